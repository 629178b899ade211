// The halving tree of core/numerics.h in SIMD: the same additions, more of them at once.
//
// With n terms padded by +0 to N = 2^k, let R(off, step) be the sum over the terms congruent to off
// modulo step:
//
//   R(off, step) = R(off, 2 step) + R(off + step, 2 step)      R(off, N) = term off
//
// and the tree is R(0, 1). Rows of 2^j consecutive terms obey the same rule, lane by lane, and then
// the tree goes on inside the row. So any vector width and any split by residue gives the same
// bits, and a sum of any length needs k partial rows. Adding +0 turns -0 into +0, so padding is
// added wherever the tree adds it, and nowhere else.
#if defined(BITTERN_CPU_REDUCE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_CPU_REDUCE_INL_H_
#undef BITTERN_CPU_REDUCE_INL_H_
#else
#define BITTERN_CPU_REDUCE_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <cstdint>

#include "cpu/reduce.h"
#include "cpu/simd-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {

// ---- one run, from a leaf that computes its terms ----
//
// leaf(i) gives terms i .. i + W - 1, leaf(i, count) the first `count` < W of them and +0 in the
// other lanes. Either a vector, or TwoTerms for two sums in one pass.

template <class V>
struct TwoTerms {
  V first, second;
};

template <class V>
HWY_INLINE V Plus(V a, V b) {
  return hn::Add(a, b);
}
template <class V>
HWY_INLINE TwoTerms<V> Plus(TwoTerms<V> a, TwoTerms<V> b) {
  return {hn::Add(a.first, b.first), hn::Add(a.second, b.second)};
}
template <class D>
HWY_INLINE hn::Vec<D> ZeroTerms(D d, Type<hn::Vec<D>>) {
  return hn::Zero(d);
}
template <class D>
HWY_INLINE TwoTerms<hn::Vec<D>> ZeroTerms(D d, Type<TwoTerms<hn::Vec<D>>>) {
  return {hn::Zero(d), hn::Zero(d)};
}
template <class Leaf>
using Terms = decltype(std::declval<const Leaf&>()(std::int64_t{0}));

// Rows row, row + step, ... of 2^j whole ones; kRows of them.
template <int kRows, class D, class Leaf>
HWY_INLINE Terms<Leaf> FewRows(D d, const Leaf& leaf, std::int64_t row, std::int64_t step) {
  if constexpr (kRows == 1) {
    return leaf(row * static_cast<std::int64_t>(hn::Lanes(d)));
  } else {
    return Plus(FewRows<kRows / 2>(d, leaf, row, 2 * step),
                FewRows<kRows / 2>(d, leaf, row + step, 2 * step));
  }
}
template <class D, class Leaf>
HWY_NOINLINE Terms<Leaf> ManyRows(D d, const Leaf& leaf, std::int64_t rows, std::int64_t row,
                                  std::int64_t step) {
  if (rows == 8 * step) return FewRows<8>(d, leaf, row, step);
  const auto even = ManyRows(d, leaf, rows, row, 2 * step);
  return Plus(even, ManyRows(d, leaf, rows, row + step, 2 * step));
}
// Any n. Each leaf is called out of line once, to keep the code small.
template <class D, class Leaf>
HWY_NOINLINE Terms<Leaf> RaggedRows(D d, const Leaf& leaf, std::int64_t n, std::int64_t row,
                                    std::int64_t step) {
  const auto width = static_cast<std::int64_t>(hn::Lanes(d));
  if (step * width >= n) {
    const std::int64_t count = n - row * width;
    return count >= width ? leaf(row * width) : leaf(row * width, count);
  }
  const auto even = RaggedRows(d, leaf, n, row, 2 * step);
  if ((row + step) * width >= n) return Plus(even, ZeroTerms(d, Type<Terms<Leaf>>()));
  return Plus(even, RaggedRows(d, leaf, n, row + step, 2 * step));
}

// The tree over the rows of n >= 1 terms: what is left is the tree inside the vector, over
// RowWidth(d, n) lanes.
template <class D, class Leaf>
HWY_INLINE Terms<Leaf> RowTree(D d, std::int64_t n, const Leaf& leaf) {
  const auto width = static_cast<std::int64_t>(hn::Lanes(d));
  if (n == width) return FewRows<1>(d, leaf, 0, 1);
  if (n == 2 * width) return FewRows<2>(d, leaf, 0, 1);
  if (n == 4 * width) return FewRows<4>(d, leaf, 0, 1);
  if (n == 8 * width) return FewRows<8>(d, leaf, 0, 1);
  if (n > width && std::has_single_bit(static_cast<std::uint64_t>(n))) {
    return ManyRows(d, leaf, n / width, 0, 1);
  }
  return RaggedRows(d, leaf, n, 0, 1);
}

template <class D>
HWY_INLINE std::int64_t RowWidth(D d, std::int64_t n) {
  const auto width = static_cast<std::int64_t>(hn::Lanes(d));
  return n >= width ? width
                    : static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(n)));
}

// The tree over the first `width` lanes, a power of two.
template <class D>
HWY_INLINE hn::TFromD<D> LaneTree(D d, hn::Vec<D> v, std::int64_t width) {
  HWY_ALIGN hn::TFromD<D> lane[hn::MaxLanes(D())];
  hn::Store(v, d, lane);
  for (std::int64_t stride = width / 2; stride > 0; stride /= 2)
    for (std::int64_t i = 0; i < stride; ++i) lane[i] += lane[i + stride];
  return lane[0];
}

// Lane g of the result is the tree over all lanes of v[g]: W vectors at once, two shuffles and an
// operation for every two vectors that become one. Overwrites v.
template <class D, class Plus>
HWY_INLINE hn::Vec<D> LaneFold(D d, hn::Vec<D>* HWY_RESTRICT v, const Plus& plus) {
  constexpr std::size_t kBytes = hn::MaxLanes(D()) * sizeof(hn::TFromD<D>);
  static_assert(kBytes == 32 || kBytes == 64);
  std::size_t n = hn::MaxLanes(d) / 2;
  for (std::size_t i = 0; i < n; ++i) {  // halves: g's bit goes to the upper half
    v[i] = plus(hn::ConcatLowerLower(d, v[i + n], v[i]), hn::ConcatUpperUpper(d, v[i + n], v[i]));
  }
  if constexpr (kBytes == 64) {
    n /= 2;
    for (std::size_t i = 0; i < n; ++i) {  // 128-bit blocks of each half
      v[i] = plus(hn::OddEvenBlocks(hn::SwapAdjacentBlocks(v[i + n]), v[i]),
                  hn::OddEvenBlocks(v[i + n], hn::SwapAdjacentBlocks(v[i])));
    }
  }
  if constexpr (sizeof(hn::TFromD<D>) == 8) {
    return plus(hn::InterleaveLower(d, v[0], v[1]), hn::InterleaveUpper(d, v[0], v[1]));
  } else {
    const hn::RepartitionToWide<D> dw;
    const auto a = hn::BitCast(
        dw, plus(hn::InterleaveLower(d, v[0], v[1]), hn::InterleaveUpper(d, v[0], v[1])));
    const auto b = hn::BitCast(
        dw, plus(hn::InterleaveLower(d, v[2], v[3]), hn::InterleaveUpper(d, v[2], v[3])));
    return plus(hn::BitCast(d, hn::InterleaveLower(dw, a, b)),
                hn::BitCast(d, hn::InterleaveUpper(dw, a, b)));
  }
}
template <class D>
HWY_INLINE hn::Vec<D> LaneTrees(D d, hn::Vec<D>* HWY_RESTRICT v) {
  return LaneFold(d, v, [](auto a, auto b) HWY_ATTR { return hn::Add(a, b); });
}

// ---- terms in memory, by blocks (see cpu/reduce.h) ----

template <class D>
HWY_INLINE void AddTo(D d, const hn::TFromD<D>* from, std::int64_t n, hn::TFromD<D>* to) {
  const auto width = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t i = 0;
  for (; i + width <= n; i += width)
    hn::StoreU(hn::Add(hn::LoadU(d, to + i), hn::LoadU(d, from + i)), d, to + i);
  for (; i < n; ++i) to[i] += from[i];
}

// R(block, step) over the blocks: lanes() partial sums. fill(first, count, block) writes terms
// [first, first + count) of every column to block[(sum * rows + term) * columns + column]; it is
// called once for each term.
template <class D, class Fill>
HWY_NOINLINE void BlockTree(D d, const cpu::BlockShape& shape, const Fill& fill, std::int64_t block,
                            std::int64_t step, hn::TFromD<D>* out) {
  using T = hn::TFromD<D>;
  if (block >= shape.blocks) {
    std::fill_n(out, shape.lanes(), T(0));
    return;
  }
  if (step >= shape.blocks) {
    const std::int64_t first = block * shape.rows;
    const std::int64_t count = std::min(shape.rows, shape.n - first);
    fill(first, count, out);
    if (count < shape.rows) {
      for (std::int64_t sum = 0; sum < shape.sums; ++sum)
        std::fill(out + (sum * shape.rows + count) * shape.columns,
                  out + (sum + 1) * shape.rows * shape.columns, T(0));
    }
    return;
  }
  BlockTree(d, shape, fill, block, 2 * step, out);
  HWY_ALIGN T odd[cpu::kBlockLanes];
  BlockTree(d, shape, fill, block + step, 2 * step, odd);
  AddTo(d, odd, shape.lanes(), out);
}

// The tree inside a block that BlockTree(..., 0, 1, block) left: the sum of column c is then at
// block[sum * rows * columns + c].
template <class D>
HWY_INLINE void FinishBlock(D d, const cpu::BlockShape& shape, hn::TFromD<D>* block) {
  for (std::int64_t sum = 0; sum < shape.sums; ++sum) {
    hn::TFromD<D>* at = block + sum * shape.rows * shape.columns;
    for (std::int64_t stride = shape.rows / 2; stride > 0; stride /= 2)
      AddTo(d, at + stride * shape.columns, stride * shape.columns, at);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif
#endif
