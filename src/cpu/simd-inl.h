// What every *_cpu.cc includes after foreach_target.h: Highway, and whether this pass has SIMD
// code. (The pass for the baseline target compiles nothing: CPUs without AVX2 use `ref`.)
// Per-target include guard, as Highway's own -inl.h files have.
#if defined(BITTERN_CPU_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_CPU_SIMD_INL_H_
#undef BITTERN_CPU_SIMD_INL_H_
#else
#define BITTERN_CPU_SIMD_INL_H_
#endif

#include "bittern/dtype.h"
#include "hwy/highway.h"

#undef BITTERN_SIMD
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128
#define BITTERN_SIMD 0
#else
#define BITTERN_SIMD 1
#endif

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Loads a vector of any float dtype as f32 or f64 lanes, exactly.
template <class D>
HWY_INLINE hn::Vec<D> LoadMath(D d, const hn::TFromD<D>* p) {
  return hn::LoadU(d, p);
}
template <class D>
HWY_INLINE hn::Vec<D> LoadMath(D d, const bf16* p) {
  const hn::Rebind<hwy::bfloat16_t, D> dh;
  return hn::PromoteTo(d, hn::LoadU(dh, reinterpret_cast<const hwy::bfloat16_t*>(p)));
}
template <class D>
HWY_INLINE hn::Vec<D> LoadMath(D d, const f16* p) {
  const hn::Rebind<hwy::float16_t, D> dh;
  return hn::PromoteTo(d, hn::LoadU(dh, reinterpret_cast<const hwy::float16_t*>(p)));
}

// f32 lanes rounded to bf16, nearest even. The upper half of each lane holds the bits, the lower
// half is undefined. Done in integers, because vcvtneps2bf16 would flush subnormals.
template <class D>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> Bf16InUpperHalf(D, hn::Vec<D> v) {
  const hn::RebindToUnsigned<D> du;
  const auto u = hn::BitCast(du, v);
  const auto odd = hn::And(hn::ShiftRight<16>(u), hn::Set(du, 1u));
  const auto rounded = hn::Add(hn::Add(u, hn::Set(du, 0x7fffu)), odd);
  const auto quiet = hn::Or(u, hn::Set(du, 0x400000u));
  return hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(v)), quiet, rounded);
}
template <class D>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> Bf16Bits(D d, hn::Vec<D> v) {
  return hn::ShiftRight<16>(Bf16InUpperHalf(d, v));
}

// Stores f32 or f64 lanes as any float dtype, rounding to nearest even.
template <class D>
HWY_INLINE void StoreMath(D d, hn::Vec<D> v, hn::TFromD<D>* p) {
  hn::StoreU(v, d, p);
}
template <class D>
HWY_INLINE void StoreMath(D d, hn::Vec<D> v, f16* p) {
  const hn::Rebind<hwy::float16_t, D> dh;
  hn::StoreU(hn::DemoteTo(dh, v), dh, reinterpret_cast<hwy::float16_t*>(p));
}
template <class D>
HWY_INLINE void StoreMath(D d, hn::Vec<D> v, bf16* p) {
  const hn::Rebind<std::uint16_t, D> dh;
  hn::StoreU(hn::TruncateTo(dh, Bf16Bits(d, v)), dh, reinterpret_cast<std::uint16_t*>(p));
}

// x / s in five quick operations, for many x over one s: `inverse` is 1 / s as Div rounds it. The
// first correction brings z within one ulp; then the remainder is exact, and by Markstein's theorem
// the second gives what Div gives. For |s| and x / s far from the ends of the exponent range; a
// smaller x gives a smaller z, an infinite one NaN.
template <class V>
HWY_INLINE V DivideBy(V s, V inverse, V x) {
  V z = hn::Mul(x, inverse);
  z = hn::MulAdd(hn::NegMulAdd(z, s, x), inverse, z);
  return hn::MulAdd(hn::NegMulAdd(z, s, x), inverse, z);
}

// Lanes rounded to X and back.
template <class X, class D>
HWY_INLINE hn::Vec<D> RoundMath(D d, hn::Vec<D> v) {
  if constexpr (std::is_same_v<X, f16>) {
    return hn::PromoteTo(d, hn::DemoteTo(hn::Rebind<hwy::float16_t, D>(), v));
  } else if constexpr (std::is_same_v<X, bf16>) {
    const hn::RebindToUnsigned<D> du;
    return hn::BitCast(d, hn::And(Bf16InUpperHalf(d, v), hn::Set(du, 0xffff0000u)));
  } else {
    return v;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif
#endif
