// Plans on many threads at once. The tsan preset builds and runs only this file.
#include <gtest/gtest.h>

#include <atomic>
#include <new>
#include <thread>

#include "core/scratch.h"
#include "core/thread_count.h"
#include "cpu/parallel.h"
#include "oracle/oracle_impl.h"

namespace bittern {
namespace {

constexpr int kCallers = 4;

template <class F>
void on_threads(int count, F&& f) {
  std::vector<std::thread> threads;
  for (int t = 0; t < count; ++t) threads.emplace_back([&f, t] { f(t); });
  for (std::thread& thread : threads) thread.join();
}

// A few of an op's check cases, spread over its list.
template <class Op>
std::vector<typename Op::Desc> some_cases() {
  const auto all = oracle::Cases<Op>::check();
  std::vector<typename Op::Desc> some;
  const std::size_t stride = std::max<std::size_t>(1, all.size() / 5);
  for (std::size_t i = stride / 2; i < all.size(); i += stride) some.push_back(all[i]);
  return some;
}

// The operands after `plan` has run on them; the same seed gives the same inputs.
template <class Op>
oracle::Problem<Op> outcome(const Plan<Op>& plan) {
  auto problem = oracle::make_problem<Op>(plan.desc(), 1, {});
  const Status s =
      oracle::run_on(Device{}, problem, plan.workspace_bytes(),
                     [&](const auto& args, Workspace w) { return plan.run(args, {}, w); });
  EXPECT_TRUE(s.ok()) << s.message();
  return problem;
}

// "" or the first difference from what ref writes.
template <class Op>
std::string differs_from_ref(const Plan<Op>& plan) {
  const auto ref = Plan<Op>::select(plan.desc(), {}, Preference::exact, "ref");
  auto want = outcome(*ref), got = outcome(plan);
  return oracle::compare(got, want);
}

template <class F>
void for_each_op(F&& f) {
#define BITTERN_OP(T, folder, CPU, CUDA) f(Type<T>{});
#include "ops/ops.inc"
}

// Splits even small problems over the team; restores the defaults at the end.
class Threads : public ::testing::Test {
 protected:
  void SetUp() override { cpu::ignore_grain(true); }
  void TearDown() override {
    cpu::ignore_grain(false);
    cpu::force_isa(cpu::Isa::none);
    set_num_threads(0);
  }
};

TEST_F(Threads, ResultsDoNotDependOnTheTeam) {
  for_each_op([]<class Op>(Type<Op>) {
    for (const auto& desc : some_cases<Op>()) {
      const auto plan = Plan<Op>::select(desc);
      ASSERT_TRUE(plan.ok()) << plan.status().message();
      for (const int threads : {1, 2, 7}) {
        set_num_threads(threads);
        EXPECT_EQ(differs_from_ref(*plan), "") << Op::kName << ", " << threads << " threads";
      }
    }
  });
}

TEST_F(Threads, ResultsDoNotDependOnAPlansOwnThreads) {
  set_num_threads(3);
  for_each_op([]<class Op>(Type<Op>) {
    for (const auto& desc : some_cases<Op>()) {
      for (const int threads : {1, 2, 7}) {
        const auto plan = Plan<Op>::select(desc, {}, Preference::exact, {}, threads);
        ASSERT_TRUE(plan.ok()) << plan.status().message();
        EXPECT_EQ(plan->threads(), threads);
        EXPECT_EQ(differs_from_ref(*plan), "") << Op::kName << ", " << threads << " threads";
      }
    }
  });
  EXPECT_EQ(num_threads(), 3);
}

// How many ranges cpu::parallel makes of much work, each of which is a thread's.
int team_size() {
  std::atomic<int> ranges = 0;
  cpu::parallel(1000, 1, [&](std::int64_t, std::int64_t) { ++ranges; });
  return ranges;
}

TEST_F(Threads, CountsAreOfOneThreadAndEnd) {
  set_num_threads(3);
  EXPECT_EQ(team_size(), 3);
  {
    const ThreadCount five(5);
    EXPECT_EQ(team_size(), 5);
    std::thread([] { EXPECT_EQ(team_size(), 3); }).join();
    const ThreadCount as_before(0);
    EXPECT_EQ(team_size(), 5);
    const ThreadCount two(2);
    EXPECT_EQ(team_size(), 2);
  }
  EXPECT_EQ(team_size(), 3);
}

TEST_F(Threads, PlansWithDifferentCountsRunAtOnce) {
  for_each_op([]<class Op>(Type<Op>) {
    const auto cases = some_cases<Op>();
    on_threads(kCallers, [&](int t) {
      for (const auto& desc : cases) {
        const auto plan = Plan<Op>::select(desc, {}, Preference::exact, {}, 1 + t);
        ASSERT_TRUE(plan.ok()) << plan.status().message();
        EXPECT_EQ(differs_from_ref(*plan), "") << Op::kName;
      }
    });
  });
}

TEST_F(Threads, APlansCountIsChecked) {
  const QuantizeDesc desc{.outer_size = 1, .axis_size = 8, .group_size = 8};
  const auto select = [&](int threads) {
    return Plan<QuantizePerGroup>::select(desc, {}, Preference::exact, {}, threads).status();
  };
  EXPECT_TRUE(select(0).ok());
  const std::string most = std::to_string(max_threads());
  EXPECT_EQ(
      select(-1).message(),
      "quantize_per_group: threads: -1, expected 0 (as num_threads says) or an integer 1.." + most);
  EXPECT_EQ(select(1 << 30).message(),
            "quantize_per_group: threads: 1073741824, expected an integer 1.." + most);
  EXPECT_EQ(select(1 << 30).code(), Code::invalid_argument);
  EXPECT_TRUE(check_environment().ok());  // nothing is left behind
}

// Inside a region there is one thread, whatever a plan was promised.
TEST_F(Threads, RegionsDoNotNest) {
  set_num_threads(4);
  std::atomic<int> inner = 0, outer = 0;
  cpu::parallel(4, 1, [&](std::int64_t, std::int64_t) {
    ++outer;
    EXPECT_EQ(num_threads(), 1);
    const ThreadCount three(3);
    inner += team_size();
  });
  EXPECT_EQ(outer, 4);
  EXPECT_EQ(inner, 4);
  EXPECT_EQ(num_threads(), 4);
  const Status status = cpu::parallel_queue(8, 4, [&](std::int64_t, std::int64_t) -> Status {
    EXPECT_EQ(team_size(), 1);
    return {};
  });
  EXPECT_TRUE(status.ok());
  EXPECT_EQ(team_size(), 4);
}

TEST_F(Threads, PlansInARegionGiveTheSameBits) {
  set_num_threads(3);
  for_each_op([]<class Op>(Type<Op>) {
    for (const auto& desc : some_cases<Op>()) {
      const auto plan = Plan<Op>::select(desc);  // with scratch for three
      ASSERT_TRUE(plan.ok()) << plan.status().message();
      cpu::parallel(3, 1, [&](std::int64_t, std::int64_t) {
        EXPECT_EQ(differs_from_ref(*plan), "") << Op::kName;
      });
    }
  });
}

TEST_F(Threads, AQueueGivesEachSlotToOneCall) {
  set_num_threads(4);
  for (const std::int64_t slots : {1, 3, 9}) {
    std::vector<std::atomic<int>> busy(9), calls(200);
    const Status status =
        cpu::parallel_queue(200, slots, [&](std::int64_t i, std::int64_t slot) -> Status {
          EXPECT_LT(slot, std::min<std::int64_t>(slots, 4));
          EXPECT_EQ(++busy[static_cast<std::size_t>(slot)], 1);
          ++calls[static_cast<std::size_t>(i)];
          --busy[static_cast<std::size_t>(slot)];
          return {};
        });
    EXPECT_TRUE(status.ok());
    for (const auto& count : calls) EXPECT_EQ(count, 1);
  }
  EXPECT_TRUE(
      cpu::parallel_queue(0, 4, [](std::int64_t, std::int64_t) { return invalid("called"); }).ok());
}

TEST_F(Threads, TheFirstFailureOfAQueueIsItsAnswer) {
  set_num_threads(4);
  for (int repeat = 0; repeat < 50; ++repeat) {
    std::atomic<std::int64_t> last = 0;
    const Status status =
        cpu::parallel_queue(100000, 4, [&](std::int64_t i, std::int64_t) -> Status {
          last = std::max<std::int64_t>(last, i);
          if (i == 57) throw std::bad_alloc();
          return i > 57 ? invalid("later") : Status();
        });
    EXPECT_EQ(status.code(), Code::out_of_memory);
    EXPECT_LT(last, 1000);
  }
}

TEST_F(Threads, AnExceptionOfARangeReachesTheCaller) {
  for (const int threads : {1, 4}) {
    set_num_threads(threads);
    std::atomic<int> ended = 0;
    const auto run = [&] {
      cpu::parallel(4, 1, [&](std::int64_t begin, std::int64_t end) {
        ended += static_cast<int>(end - begin);
        if (begin == 0) throw std::bad_alloc();
      });
    };
    EXPECT_THROW(run(), std::bad_alloc);
    EXPECT_EQ(ended, 4);
    EXPECT_EQ(num_threads(), threads);
  }
}

TEST_F(Threads, ATeamThatStaysAwakeDoesWhatOthersDo) {
  set_num_threads(4);
  std::vector<std::int64_t> sums(1000);
  cpu::keep_team_awake([&] {
    EXPECT_EQ(team_size(), 4);
    for (int region = 0; region < 300; ++region) {
      // Sizes that take some of its threads, all of them, or the caller alone.
      const std::int64_t n = 1 + region % 7;
      cpu::parallel(n, 1, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) sums[static_cast<std::size_t>(i)] += i + 1;
        if (n > 1) {  // otherwise there is no region
          EXPECT_EQ(num_threads(), 1);
        }
      });
    }
    const ThreadCount fewer(2);
    EXPECT_EQ(team_size(), 2);
    const ThreadCount more(6);  // than are awake
    EXPECT_EQ(team_size(), 6);
    cpu::keep_team_awake([&] { EXPECT_EQ(team_size(), 6); });
    EXPECT_TRUE(cpu::parallel_queue(50, 4, [&](std::int64_t i, std::int64_t) -> Status {
                  sums[static_cast<std::size_t>(i)] += 1;
                  return {};
                }).ok());
  });
  EXPECT_EQ(sums[0], 301);
  EXPECT_EQ(sums[6], 300 / 7 * 7 + 1);
  EXPECT_EQ(sums[49], 1);
  EXPECT_EQ(team_size(), 4);
}

TEST_F(Threads, AnExceptionEndsATeamThatIsAwake) {
  set_num_threads(3);
  EXPECT_THROW(cpu::keep_team_awake([] { throw std::bad_alloc(); }), std::bad_alloc);
  EXPECT_THROW(cpu::keep_team_awake([] {
                 cpu::parallel(3, 1, [](std::int64_t begin, std::int64_t) {
                   if (begin == 2) throw std::bad_alloc();
                 });
               }),
               std::bad_alloc);
  EXPECT_EQ(team_size(), 3);
}

// Flush to zero, denormals are zero, other roundings, traps: as the program or a library of its may
// have set them, in the calling thread, and from there in the threads of its team.
TEST_F(Threads, TheCallersFloatModesDoNotMatterAndAreKept) {
  constexpr unsigned kDefault = 0x1f80, kModes = 0xffc0;
  for (const unsigned mode : {kDefault | 0x8040, kDefault | 0x4000, kDefault | 0x6000, 0u}) {
    for_each_op([&]<class Op>(Type<Op>) {
      for (const auto& desc : some_cases<Op>()) {
        const auto ref = Plan<Op>::select(desc, {}, Preference::exact, "ref");
        const auto plan = Plan<Op>::select(desc);
        ASSERT_TRUE(plan.ok()) << plan.status().message();
        auto want = outcome(*ref);
        for (const auto* each : {&*ref, &*plan}) {
          for (const int threads : {1, 3}) {
            set_num_threads(threads);
            auto got = oracle::make_problem<Op>(desc, 1, {});
            AlignedScratch scratch(each->workspace_bytes());
            const Workspace workspace = scratch.workspace();
            Status status;
            bool kept = true;
            // A new thread, and a team of its own that was in use before, in the same mode.
            std::thread([&] {
#pragma omp parallel num_threads(threads)
              __builtin_ia32_ldmxcsr(mode);
              // LLVM's runtime gives the caller its own mode back after a region.
              __builtin_ia32_ldmxcsr(mode);
              const auto chosen = Plan<Op>::select(desc, {}, Preference::exact, each->sku().kernel);
              status = chosen.ok() ? chosen->run(got.args, {}, workspace) : chosen.status();
#pragma omp parallel num_threads(threads)
              {
                const unsigned now = __builtin_ia32_stmxcsr();
#pragma omp critical
                kept = kept && (now & kModes) == mode;
              }
            }).join();
            EXPECT_TRUE(status.ok()) << status.message();
            EXPECT_TRUE(kept) << Op::kName << ", mode " << mode << ", " << threads << " threads";
            EXPECT_EQ(oracle::compare(got, want), "")
                << Op::kName << ", mode " << mode << ", " << threads << " threads";
          }
        }
      }
    });
  }
}

TEST_F(Threads, ManyCallersSelectAndRunAtOnce) {
  set_num_threads(2);
  for_each_op([]<class Op>(Type<Op>) {
    for (const auto& desc : some_cases<Op>()) {
      const auto shared = Plan<Op>::select(desc);
      ASSERT_TRUE(shared.ok()) << shared.status().message();
      on_threads(kCallers, [&](int) {
        EXPECT_EQ(differs_from_ref(*shared), "") << Op::kName;
        const auto own = Plan<Op>::select(desc);
        ASSERT_TRUE(own.ok()) << own.status().message();
        EXPECT_EQ(differs_from_ref(*own), "") << Op::kName;
      });
    }
  });
}

TEST_F(Threads, SettingsMayChangeWhilePlansRun) {
  std::atomic<bool> done{false};
  std::thread meddler([&] {
    for (int i = 0; !done.load(); ++i) {
      set_num_threads(1 + i % 7);
      const auto isas = cpu::available_isas();
      if (!isas.empty()) cpu::force_isa(isas[static_cast<std::size_t>(i) % isas.size()]);
      std::this_thread::yield();
    }
  });
  for_each_op([]<class Op>(Type<Op>) {
    const auto cases = some_cases<Op>();
    on_threads(2, [&](int) {
      for (const auto& desc : cases) {
        const auto plan = Plan<Op>::select(desc);
        ASSERT_TRUE(plan.ok()) << plan.status().message();
        EXPECT_EQ(differs_from_ref(*plan), "") << Op::kName;
      }
    });
  });
  done = true;
  meddler.join();
}

TEST_F(Threads, EachCallerGetsItsOwnError) {
  const QuantizeDesc quantize{.outer_size = 1, .axis_size = 8, .group_size = 8};
  const auto plan = Plan<QuantizePerGroup>::select(quantize);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  const float x[8] = {}, scale[1] = {1};
  on_threads(kCallers, [&](int t) {
    for (int i = 0; i < 500; ++i) {
      std::int8_t q[8];
      QuantizePerGroup::Args args{view(x, {1, 8}), view(scale, {1, 1}), {}, view(q, {1, 8})};
      QuantizeDesc bad = quantize;
      bad.group_size = -1 - t;
      args.x.shape[1] = 100 + t;
      EXPECT_EQ(plan->run(args).message(), "quantize_per_group: x: shape [1," +
                                               std::to_string(100 + t) +
                                               "], expected [1,8] = [outer_size,axis_size]");
      const auto refused = Plan<QuantizePerGroup>::select(bad);
      EXPECT_EQ(refused.status().message(), "quantize_per_group: group_size: " +
                                                std::to_string(-1 - t) + ", expected at least 1");
    }
  });
}

}  // namespace
}  // namespace bittern
