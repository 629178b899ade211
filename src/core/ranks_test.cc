// What processes share, with threads in their place.
#include "core/ranks.h"

#include <gtest/gtest.h>

#include <atomic>
#include <string>

#include "core/test_ranks.h"

namespace bittern {
namespace {

TEST(Ranks, BytesGoWhereTheyShould) {
  ThreadRanks::run(3, [](Ranks& ranks) {
    EXPECT_EQ(ranks.count(), 3);
    std::vector<std::byte> own(static_cast<std::size_t>(2 * ranks.rank()),
                               static_cast<std::byte>(ranks.rank()));
    std::vector<std::vector<std::byte>> all;
    ASSERT_TRUE(ranks.gather(own, all).ok());
    ASSERT_EQ(all.size(), 3u);
    for (std::size_t i = 0; i < 3; ++i)
      EXPECT_EQ(all[i], std::vector(2 * i, static_cast<std::byte>(i)));
    ASSERT_TRUE(ranks.collect(own, all).ok());
    EXPECT_EQ(all.size(), ranks.rank() == 0 ? 3u : 0u);
    std::byte one{static_cast<std::byte>(7 + ranks.rank())};
    ASSERT_TRUE(ranks.broadcast({&one, 1}).ok());
    EXPECT_EQ(one, std::byte{7});
  });
}

TEST(Ranks, AgreeOnTheFirstError) {
  ThreadRanks::run(4, [](Ranks& ranks) {
    EXPECT_TRUE(ranks.agree({}).ok());
    const Status own = ranks.rank() == 0   ? Status()
                       : ranks.rank() == 1 ? invalid("bits: 9, expected less")
                                           : invalid("bits: 10, expected less");
    const Status first = ranks.agree(own);
    EXPECT_EQ(first.code(), Code::invalid_argument);
    EXPECT_EQ(first.message(), "bits: 9, expected less");
    // From then on nobody waits for anybody.
    for (int i = 0; i <= ranks.rank(); ++i)
      EXPECT_EQ(ranks.agree({}).message(), "bits: 9, expected less");
    EXPECT_EQ(ranks.agree(invalid("the same in other words")).message(), "the same in other words");
  });
  // What is of one machine says which process that is.
  ThreadRanks::run(2, [](Ranks& ranks) {
    const Status own = ranks.rank() == 0 ? Status() : unavailable("model: no such file");
    EXPECT_EQ(ranks.agree(own).message(), "process 1: model: no such file");
  });
}

TEST(Ranks, OneThatEndsKeepsNobodyWaiting) {
  ThreadRanks::run(3, [](Ranks& ranks) {
    if (ranks.rank() == 1) return;
    EXPECT_EQ(ranks.agree({}).code(), Code::unavailable);
  });
}

TEST(Ranks, ItemsAreMadeOnceAndTakenInOrder) {
  for (const DealTo to : {DealTo::first, DealTo::all}) {
    for (const int count : {1, 2, 3, 4}) {
      for (const std::int64_t items : {0, 1, 5, 6}) {
        std::atomic<int> made = 0;
        ThreadRanks::run(count, [&](Ranks& ranks) {
          std::vector<std::int64_t> taken;
          const auto make = [&](std::int64_t i, Packer& out) {
            EXPECT_EQ(i % count, ranks.rank());
            ++made;
            for (std::int64_t j = 0; j < i; ++j) out.add(i * i);
            return Status();
          };
          const auto take = [&](std::int64_t i, Unpacker in) {
            EXPECT_EQ(i, std::ssize(taken));
            for (std::int64_t j = 0; j < i; ++j) EXPECT_EQ(in.next<std::int64_t>(), i * i);
            EXPECT_TRUE(in.empty());
            taken.push_back(i);
            return Status();
          };
          EXPECT_TRUE(deal(&ranks, items, to, make, take).ok());
          const bool here = to == DealTo::all || ranks.rank() == 0;
          EXPECT_EQ(std::ssize(taken), here ? items : 0);
        });
        EXPECT_EQ(made, items);
      }
    }
  }
}

TEST(Ranks, AnErrorInADealReachesAll) {
  for (const std::int64_t bad : {0, 1, 4, 5}) {  // of 6 items: in the first round, and in the last
    for (const bool made : {false, true}) {
      ThreadRanks::run(3, [&](Ranks& ranks) {
        const auto make = [&](std::int64_t i, Packer&) {
          return made && i == bad ? invalid("item " + std::to_string(i)) : Status();
        };
        const auto take = [&](std::int64_t i, Unpacker) {
          return !made && i == bad ? invalid("item " + std::to_string(i)) : Status();
        };
        EXPECT_EQ(deal(&ranks, 6, DealTo::first, make, take).message(),
                  "item " + std::to_string(bad));
      });
    }
  }
}

TEST(Ranks, RunsAreSharedOut) {
  ThreadRanks::run(4, [](Ranks& ranks) {
    for (const std::int64_t most : {1, 3, 64}) {
      for (std::int64_t runs = 0; runs < 40; ++runs) {
        const RunItems items = items_of_runs(&ranks, runs, most);
        EXPECT_LE(items.length, most);
        EXPECT_GE(items.items * items.length, runs);
        EXPECT_LT((items.items - 1) * items.length, std::max<std::int64_t>(runs, 1));
        if (runs >= 16 && most == 64) {
          EXPECT_EQ(items.items, 4);
        }
      }
    }
  });
  EXPECT_EQ(items_of_runs(nullptr, 1000, 3).items, 1);
}

}  // namespace
}  // namespace bittern
