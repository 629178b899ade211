// What the norms share.
#if defined(BITTERN_CPU_NORM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_CPU_NORM_INL_H_
#undef BITTERN_CPU_NORM_INL_H_
#else
#define BITTERN_CPU_NORM_INL_H_
#endif

#include <algorithm>
#include <cmath>

#include "cpu/tree_rows-inl.h"
#include "ops/layers/lines-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace norm {

using lines::Lines;
using lines::V;

// 1 / sqrt(squares / dim + eps)
template <class Desc>
HWY_INLINE float Rstd(const Desc& d, float squares) {
  return 1.0f / std::sqrt(squares / static_cast<float>(d.dim) + static_cast<float>(d.eps));
}
template <class Desc, class X>
HWY_INLINE float Rstd(const Desc& d, const X* x) {
  return Rstd(d, Lines{d.dim}.Sum([&](auto part, V& a, V& b) HWY_ATTR { a = b = part.Load(x); }));
}

// f(i, row(i), rstd of this row) for the rows [begin, end). Several rows' sums, roots and quotients
// are under way at once, as many as stay in L1.
template <class Desc, class Row, class F>
HWY_INLINE void ForRstd(const Desc& d, std::int64_t begin, std::int64_t end, const Row& row,
                        const F& f) {
  const DotTag tag;
  const V dim = hn::Set(tag, static_cast<float>(d.dim));
  const V eps = hn::Set(tag, static_cast<float>(d.eps));
  const std::int64_t most = std::clamp<std::int64_t>(4096 / d.dim, 1, kDotVector);
  for (std::int64_t i = begin; i < end; i += most) {
    const std::int64_t rows = std::min(most, end - i);
    V sums[kDotVector];
    for (std::int64_t r = 0; r < kDotVector; ++r) {
      const auto* x = row(i + std::min(r, rows - 1));
      sums[r] = r < rows ? Lines{d.dim}.Lanes([&](auto part, V& a, V& b)
                                                  HWY_ATTR { a = b = part.Load(x); })
                         : hn::Zero(tag);
    }
    const V squares = LaneTrees(tag, sums);
    float rstd[kDotVector];
    hn::StoreU(hn::Div(hn::Set(tag, 1.0f), hn::Sqrt(hn::Add(hn::Div(squares, dim), eps))), tag,
               rstd);
    for (std::int64_t r = 0; r < rows; ++r) f(i + r, row(i + r), rstd[r]);
  }
}

// Columns [begin, end) of d_weight: the halving tree over the sums of the blocks of rows.
template <class Desc>
void SumBlocks(const Desc& d, const MutView& d_weight, float* partial, std::int64_t begin,
               std::int64_t end) {
  TreeRows(partial, d.blocks(), d.dim, begin, end);
  (void)visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    for (std::int64_t j = begin; j < end; ++j)
      d_weight.as<X>()[j] = from_math<X>(d.rows > 0 ? partial[j] : 0.0f);
    return Status();
  });
}

}  // namespace norm
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif
#endif
