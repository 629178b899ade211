// core/dot.h in SIMD: the 16 sums are one vector of AVX-512 or two of AVX2.
#if defined(BITTERN_CPU_DOT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_CPU_DOT_INL_H_
#undef BITTERN_CPU_DOT_INL_H_
#else
#define BITTERN_CPU_DOT_INL_H_
#endif

#include "core/dot.h"
#include "cpu/reduce-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {

using DotTag = hn::ScalableTag<float>;
inline constexpr auto kDotVector = static_cast<std::int64_t>(hn::MaxLanes(DotTag()));
static_assert(kDotLanes % kDotVector == 0);
inline constexpr int kDotParts = static_cast<int>(kDotLanes / kDotVector);

// Adds the terms of a[0, n) and b[0, n) to the sums. Terms beyond n are not added at all: adding
// +0 would change a -0.
HWY_INLINE void AddDot(const float* HWY_RESTRICT a, const float* HWY_RESTRICT b, std::int64_t n,
                       hn::Vec<DotTag> (&sum)[kDotParts]) {
  const DotTag d;
  std::int64_t i = 0;
  for (; i + kDotLanes <= n; i += kDotLanes) {
    for (int p = 0; p < kDotParts; ++p) {
      const std::int64_t at = i + p * kDotVector;
      sum[p] = hn::MulAdd(hn::LoadU(d, a + at), hn::LoadU(d, b + at), sum[p]);
    }
  }
  for (int p = 0; p < kDotParts && i + p * kDotVector < n; ++p) {
    const std::int64_t at = i + p * kDotVector;
    const auto in = hn::FirstN(d, static_cast<std::size_t>(std::min(n - at, kDotVector)));
    const auto more =
        hn::MulAdd(hn::MaskedLoad(in, d, a + at), hn::MaskedLoad(in, d, b + at), sum[p]);
    sum[p] = hn::IfThenElse(in, more, sum[p]);
  }
}

// What is left is the tree inside the vector.
HWY_INLINE hn::Vec<DotTag> JoinDot(hn::Vec<DotTag> (&sum)[kDotParts]) {
  if constexpr (kDotParts == 1) {
    return sum[0];
  } else {
    return hn::Add(sum[0], sum[1]);
  }
}

HWY_INLINE float Dot(const float* HWY_RESTRICT a, const float* HWY_RESTRICT b, std::int64_t n) {
  const DotTag d;
  hn::Vec<DotTag> sum[kDotParts];
  for (auto& s : sum) s = hn::Zero(d);
  AddDot(a, b, n, sum);
  return LaneTree(d, JoinDot(sum), kDotVector);
}

}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif
#endif
