// The chains of log_sum.h in SIMD.
#if defined(BITTERN_CPU_LOG_SUM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_CPU_LOG_SUM_INL_H_
#undef BITTERN_CPU_LOG_SUM_INL_H_
#else
#define BITTERN_CPU_LOG_SUM_INL_H_
#endif

#include "ops/layers/lines-inl.h"
#include "ops/layers/log_sum.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace lines {

using D64 = hn::ScalableTag<double>;
using V64 = hn::Vec<D64>;
inline constexpr auto kLanes64 = static_cast<std::int64_t>(hn::MaxLanes(D64()));

// A vector of f32 as two of f64.
struct Wide {
  V64 low, high;
};
HWY_INLINE void Widen(V v, Wide& out) {
  const hn::Half<DotTag> half;
  out.low = hn::PromoteTo(D64(), hn::LowerHalf(half, v));
  out.high = hn::PromoteTo(D64(), hn::UpperHalf(half, v));
}

// The chains of a block. A lane that is past the end has the term +0; the sums are never -0.
struct Chains {
  V64 sum[kLogSumChains / kLanes64];

  HWY_INLINE Chains() {
    for (auto& s : sum) s = hn::Zero(D64());
  }
  HWY_INLINE void Add(const Wide& terms, std::int64_t at) {
    const auto k = static_cast<std::size_t>(at % kLogSumChains / kLanes64);
    sum[k] = hn::Add(sum[k], terms.low);
    sum[k + 1] = hn::Add(sum[k + 1], terms.high);
  }
  double Join() const {
    alignas(64) double all[kLogSumChains];
    for (std::int64_t k = 0; k < kLogSumChains / kLanes64; ++k)
      hn::Store(sum[k], D64(), all + k * kLanes64);
    for (std::int64_t stride = kLogSumChains / 2; stride > 0; stride /= 2)
      for (std::int64_t i = 0; i < stride; ++i) all[i] += all[i + stride];
    return all[0];
  }
};

}  // namespace lines
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif
#endif
