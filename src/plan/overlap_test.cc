#include "plan/overlap.h"

#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "oracle/oracle.h"

namespace bittern {
namespace {

using plan_detail::Memory;
using plan_detail::overlap;

struct Tensor {
  std::int64_t offset = 0;  // bytes
  std::size_t size = 4;
  Shape shape, stride;
};

// Never read.
const std::byte* const kBase = reinterpret_cast<const std::byte*>(std::uintptr_t{1} << 40);

bool share(const Tensor& a, const Tensor& b) {
  const auto memory = [](const Tensor& t) {
    return Memory{kBase + t.offset, t.size, &t.shape, &t.stride};
  };
  const bool either_way = overlap(memory(a), memory(b));
  EXPECT_EQ(either_way, overlap(memory(b), memory(a)));
  return either_way;
}

std::set<std::int64_t> bytes_of(const Tensor& t) {
  std::set<std::int64_t> bytes;
  for (std::int64_t n = 0; n < t.shape.numel(); ++n) {
    std::int64_t at = t.offset, rest = n;
    for (int i = t.shape.rank; i-- > 0; rest /= t.shape[i])
      at += rest % t.shape[i] * t.stride[i] * static_cast<std::int64_t>(t.size);
    for (std::size_t byte = 0; byte < t.size; ++byte)
      bytes.insert(at + static_cast<std::int64_t>(byte));
  }
  return bytes;
}

bool share_by_looking(const Tensor& a, const Tensor& b) {
  const auto bytes = bytes_of(a);
  for (const std::int64_t byte : bytes_of(b))
    if (bytes.contains(byte)) return true;
  return false;
}

std::string text(const Tensor& t) {
  return std::to_string(t.offset) + " + " + t.shape.str() + " x " + t.stride.str() + " of " +
         std::to_string(t.size);
}

TEST(Overlap, SlicesOfOneMatrix) {
  const Tensor left{0, 4, {1000, 8}, {16, 1}}, right{32, 4, {1000, 8}, {16, 1}};
  EXPECT_FALSE(share(left, right)) << "columns";
  EXPECT_TRUE(share(left, {28, 4, {1000, 8}, {16, 1}})) << "one column in common";
  EXPECT_FALSE(share({0, 4, {500, 16}, {32, 1}}, {64, 4, {500, 16}, {32, 1}})) << "even, odd rows";
  EXPECT_TRUE(share({0, 4, {500, 16}, {32, 1}}, {64 * 997, 4, {2, 16}, {16, 1}}));
  // q, k and v of one projection [tokens, 3, heads, dim], and every second head of it.
  const Shape shape{64, 4, 32}, stride{384, 32, 1}, twice{384, 64, 1};
  EXPECT_FALSE(share({0, 2, shape, stride}, {2 * 128, 2, shape, stride}));
  EXPECT_FALSE(share({0, 2, {64, 2, 32}, twice}, {2 * 32, 2, {64, 2, 32}, twice}));
  EXPECT_TRUE(share({0, 2, shape, stride}, {2 * 32, 2, {64, 2, 32}, twice}));
  // Another dtype, another stride, the same columns.
  EXPECT_FALSE(share({0, 1, {1000, 32}, {64, 1}}, {32, 4, {500, 8}, {32, 1}}));
  EXPECT_TRUE(share({0, 1, {1000, 33}, {64, 1}}, {32, 4, {500, 8}, {32, 1}}));
}

TEST(Overlap, StridesOfDifferentLengthMeetWhereTheyMust) {
  // Rows of 10 and 11 elements first meet in row 10 of the one and 9 of the other.
  const Tensor tens{0, 4, {11, 1}, {10, 1}};
  EXPECT_FALSE(share(tens, {4, 4, {9, 1}, {11, 1}}));
  EXPECT_TRUE(share(tens, {4, 4, {10, 1}, {11, 1}}));
  // So long that no search would end, and exact all the same.
  const std::int64_t n = std::int64_t{1} << 40;
  EXPECT_FALSE(share({0, 4, {n, 1}, {6, 1}}, {4, 4, {n, 1}, {4, 1}}));
  EXPECT_TRUE(share({0, 4, {n, 1}, {7, 1}}, {4, 4, {n, 1}, {4, 1}}));
}

TEST(Overlap, OfRandomTensorsIsWhatLookingFinds) {
  oracle::Rng rng(1);
  int sharing = 0;
  const auto random = [&](int most_axes) {
    Tensor t;
    t.size = std::size_t{1} << rng.below(4);
    t.offset = rng.below(60) * (rng.chance(4) ? 1 : static_cast<std::int64_t>(t.size));
    t.shape.rank = t.stride.rank = 1 + static_cast<int>(rng.below(most_axes));
    std::int64_t row = 1;  // mostly rows apart, now and then anything
    for (int i = t.shape.rank; i-- > 0;) {
      t.shape[i] = rng.chance(30) ? 0 : 1 + rng.below(5);
      t.stride[i] =
          rng.chance(8) ? rng.below(40) - 10 : row + (i == 0 || rng.chance(3) ? rng.below(24) : 0);
      row = std::max<std::int64_t>(t.stride[i], 1) * std::max<std::int64_t>(t.shape[i], 1);
    }
    return t;
  };
  for (int i = 0; i < 40000; ++i) {
    const int axes = i % 4 == 0 ? kMaxRank / 2 : 2;
    Tensor a = random(axes), b = random(axes);
    if (rng.chance(3)) b.stride = a.stride, b.shape.rank = a.shape.rank;
    const bool expected = share_by_looking(a, b);
    sharing += expected;
    ASSERT_EQ(share(a, b), expected) << text(a) << " and " << text(b);
  }
  EXPECT_GT(sharing, 5000);
  EXPECT_LT(sharing, 32000);
}

TEST(Overlap, InterleavedLayoutsAreApart) {
  // Odd and even elements by strides so many and so odd that trying them all would take too long.
  EXPECT_FALSE(share({624, 1, {5, 7, 9, 12, 12}, {34, 216, 540, 588, 98}},
                     {601, 1, {9, 7, 7, 7}, {12, 3708, 242, 10}}));
  EXPECT_FALSE(share({2148, 2, {42, 59, 22}, {21, 6, 123}},
                     {470, 2, {12, 7, 2, 2, 6}, {18, 48, 15, 63, 561}}));
  oracle::Rng rng(3);
  for (int i = 0; i < 20000; ++i) {
    const std::int64_t parts = 2 + rng.below(6);
    const std::size_t size = std::size_t{1} << rng.below(4);
    const auto random = [&](std::int64_t part) {
      Tensor t{(rng.below(400) * parts + part) * static_cast<std::int64_t>(size), size, {}, {}};
      t.shape.rank = t.stride.rank = 2 + static_cast<int>(rng.below(5));
      for (int axis = 0; axis < t.shape.rank; ++axis) {
        t.shape[axis] = 1 + rng.below(t.shape.rank < 4 ? 60 : 12);
        t.stride[axis] = parts * (1 + rng.below(std::int64_t{1} << rng.below(12)));
      }
      return t;
    };
    const std::int64_t part = rng.below(parts);
    const Tensor a = random(part), b = random((part + 1 + rng.below(parts - 1)) % parts);
    ASSERT_FALSE(share(a, b)) << text(a) << " and " << text(b);
  }
}

TEST(Overlap, SixAxesOfAnyStrideMissNone) {
  oracle::Rng rng(2);
  const auto random = [&] {
    Tensor t{rng.below(4000), 1, {}, {}};
    t.shape.rank = t.stride.rank = kMaxRank;
    for (int i = 0; i < kMaxRank; ++i) {
      t.shape[i] = 1 + rng.below(3);
      t.stride[i] = 1 + rng.below(900);
    }
    return t;
  };
  for (int i = 0; i < 2000; ++i) {
    const Tensor a = random(), b = random();
    ASSERT_EQ(share(a, b), share_by_looking(a, b)) << text(a) << " and " << text(b);
  }
}

}  // namespace
}  // namespace bittern
