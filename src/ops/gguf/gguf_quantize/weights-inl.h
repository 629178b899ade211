// Weights as the rules of gguf_quantize see them.
#if defined(BITTERN_OPS_GGUF_QUANTIZE_WEIGHTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_OPS_GGUF_QUANTIZE_WEIGHTS_INL_H_
#undef BITTERN_OPS_GGUF_QUANTIZE_WEIGHTS_INL_H_
#else
#define BITTERN_OPS_GGUF_QUANTIZE_WEIGHTS_INL_H_
#endif

#include "cpu/stream-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {

inline constexpr hn::CappedTag<float, 16> kF;
inline constexpr hn::Rebind<std::int32_t, decltype(kF)> kI;
using Floats = hn::Vec<decltype(kF)>;
inline constexpr int kWidth = static_cast<int>(hn::MaxLanes(kF));

inline constexpr hn::FixedTag<std::uint8_t, 32> kBytes;
inline constexpr hn::FixedTag<std::uint8_t, 16> kHalfBytes;

template <class X>
HWY_INLINE Floats LoadWeights(const X* w, Floats most) {
  const auto v = LoadMath(kF, w);
  return hn::Max(hn::Min(hn::IfThenElseZero(hn::Eq(v, v), v), most), hn::Neg(most));
}

}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD
#endif
