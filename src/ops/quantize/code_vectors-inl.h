// The quantise family's arithmetic on vectors: quotients and codes, loaded and stored, and
// quotients of half-precision numbers without a division.
#if defined(BITTERN_OPS_QUANTIZE_CODE_VECTORS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_OPS_QUANTIZE_CODE_VECTORS_INL_H_
#undef BITTERN_OPS_QUANTIZE_CODE_VECTORS_INL_H_
#else
#define BITTERN_OPS_QUANTIZE_CODE_VECTORS_INL_H_
#endif

#include <cstdint>
#include <type_traits>

#include "core/numerics.h"
#include "cpu/simd-inl.h"
#include "cpu/stream-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {

template <class F>
inline constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(hn::ScalableTag<F>()));

// ---- arithmetic ----

// numerics.h quotient(): x / s, and 0 where that is NaN or s is 0.
template <class D>
HWY_INLINE hn::Vec<D> Quotient(D d, hn::Vec<D> x, hn::Vec<D> s) {
  const auto z = hn::Div(x, s);
  return hn::IfThenElseZero(hn::And(hn::Eq(z, z), hn::Ne(s, hn::Zero(d))), z);
}

// To the nearest integer, half to even. Highway's NearestInt also mends overflow, which no clamped
// value has.
template <class D>
HWY_INLINE hn::Vec<hn::RebindToSigned<D>> RoundToInt(D, hn::Vec<D> v) {
#if HWY_TARGET <= HWY_AVX3
  return hn::Vec<hn::RebindToSigned<D>>{_mm512_cvtps_epi32(v.raw)};
#else
  return hn::Vec<hn::RebindToSigned<D>>{_mm256_cvtps_epi32(v.raw)};
#endif
}

// The code, as i32 lanes, of an already clamped quotient: R(z) + zp.
template <class D>
HWY_INLINE auto CodeOf(D d, hn::Vec<D> z, hn::Vec<D> zero) {
  if constexpr (sizeof(hn::TFromD<D>) == 4) {
    return hn::Add(RoundToInt(d, z), RoundToInt(d, zero));
  } else {
    return hn::DemoteTo(hn::Rebind<std::int32_t, D>(), hn::Add(hn::Round(z), zero));
  }
}

// Bytes as f32 or f64 lanes.
template <class D, class Q>
HWY_INLINE hn::Vec<D> LoadCodes(D d, const Q* q) {
  const hn::Rebind<std::int32_t, D> di;
  const auto codes = hn::PromoteTo(di, hn::LoadU(hn::Rebind<Q, D>(), q));
  if constexpr (sizeof(hn::TFromD<D>) == 4) {
    return hn::ConvertTo(d, codes);
  } else {
    return hn::PromoteTo(d, codes);
  }
}

template <class DI, class Q>
HWY_INLINE void StoreCodes(DI, hn::Vec<DI> codes, Q* q) {
  const hn::Rebind<Q, DI> d_q;
  hn::StoreU(hn::DemoteTo(d_q, codes), d_q, q);
}

template <class DI, class Q>
HWY_INLINE void StoreCodes(DI di, hn::Vec<DI> codes, Streamed<Q> q) {
  StoreCodes(di, codes, q.to);  // less than a line: not worth streaming
}

template <class D, class T>
HWY_INLINE void StoreVector(D d, hn::Vec<D> v, T* p) {
  hn::StoreU(v, d, reinterpret_cast<hn::TFromD<D>*>(p));
}
template <class D, class T>
HWY_INLINE void StoreVector(D d, hn::Vec<D> v, Streamed<T> p) {
  if constexpr (kStreams<D>) {
    hn::Stream(v, d, reinterpret_cast<hn::TFromD<D>*>(p.to));
  } else {
    StoreVector(d, v, p.to);
  }
}

// What an output pointer points to.
template <class To>
struct Target;
template <class T>
struct Target<T*> {
  using Type = T;
};
template <class T>
struct Target<Streamed<T>> {
  using Type = T;
};
template <class To>
using TargetOf = typename Target<To>::Type;

// Four vectors of i32 codes as one of bytes; `interleaved` as LoadTwo<bf16> has them.
template <bool kInterleaved, class To, class VI>
HWY_INLINE void StoreCodes4(VI a, VI b, VI c, VI d, To q) {
  using Q = TargetOf<To>;
  const hn::Repartition<std::uint8_t, hn::DFromV<VI>> d8;
  using V16 = decltype(hn::BitCast(hn::Repartition<std::int16_t, hn::DFromV<VI>>(), a));
  const auto narrow = [](VI first, VI second) HWY_ATTR -> V16 {
    const hn::Repartition<std::int16_t, hn::DFromV<VI>> d16;
    if constexpr (kInterleaved) {
      return hn::OddEven(hn::BitCast(d16, hn::ShiftLeft<16>(second)), hn::BitCast(d16, first));
    } else {
      return hn::ReorderDemote2To(d16, first, second);
    }
  };
  const auto ab = narrow(a, b).raw, cd = narrow(c, d).raw;
#if HWY_TARGET <= HWY_AVX3
  const __m512i mixed =
      std::is_signed_v<Q> ? _mm512_packs_epi16(ab, cd) : _mm512_packus_epi16(ab, cd);
  const __m512i order =
      kInterleaved ? _mm512_setr_epi32(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15)
                   : _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  StoreVector(d8, hn::Vec<decltype(d8)>{_mm512_permutexvar_epi32(order, mixed)}, q);
#else
  const __m256i mixed =
      std::is_signed_v<Q> ? _mm256_packs_epi16(ab, cd) : _mm256_packus_epi16(ab, cd);
  const __m256i order = kInterleaved ? _mm256_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7)
                                     : _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  StoreVector(d8, hn::Vec<decltype(d8)>{_mm256_permutevar8x32_epi32(mixed, order)}, q);
#endif
}

// ---- two vectors at once ----

// Two vectors of consecutive elements in whatever lane order is cheapest: bf16 splits into its even
// and its odd elements by a shift and a mask. StoreTwo puts them back.
template <class D>
struct Two {
  hn::Vec<D> a, b;
};
template <class D, class T>
HWY_INLINE Two<D> LoadTwo(D d, const T* p) {
  if constexpr (std::is_same_v<T, bf16>) {
    const hn::RebindToUnsigned<D> du;
    const auto both = hn::LoadU(du, reinterpret_cast<const std::uint32_t*>(p));
    return {hn::BitCast(d, hn::ShiftLeft<16>(both)),
            hn::BitCast(d, hn::And(both, hn::Set(du, 0xffff0000u)))};
  } else {
    return {LoadMath(d, p), LoadMath(d, p + hn::Lanes(d))};
  }
}

template <class D, class To>
HWY_INLINE void StoreTwo(D d, Two<D> v, To p) {
  if constexpr (std::is_same_v<TargetOf<To>, bf16>) {
    const hn::Repartition<std::uint16_t, D> d16;
    const auto even = hn::BitCast(d16, Bf16Bits(d, v.a));
    StoreVector(d16, hn::OddEven(hn::BitCast(d16, Bf16InUpperHalf(d, v.b)), even), p);
  } else {
    StoreMath(d, v.a, p);
    StoreMath(d, v.b, p + static_cast<std::int64_t>(hn::Lanes(d)));
  }
}

// ---- half x with half scales: R(x / s) without a division ----

// Two significands of at most 11 bits: x / s is a tie k + 1/2 exactly, or at least 2^-12 away from
// one. NearQuotient is exact where x / s is representable and within 2^-22 of it, relatively, so up
// to |z| = 512 it rounds as the quotient does, and beyond it is as far outside. Not so for scales
// near the ends of the exponent range (Inverse is then 0) nor for x that makes it NaN.
inline constexpr float kNearLimit = 512;

// 1 / s, or 0 where the quotient needs a division.
template <class D>
HWY_INLINE hn::Vec<D> Inverse(D d, hn::Vec<D> s, hn::Vec<D> lo, hn::Vec<D> hi) {
  const auto size = hn::Abs(s), limit = hn::Set(d, kNearLimit);
  const auto ordinary =
      hn::And(hn::Gt(size, hn::Set(d, 0x1p-100f)), hn::Lt(size, hn::Set(d, 0x1p100f)));
  const auto near = hn::And(hn::Ge(lo, hn::Neg(limit)), hn::Le(hi, limit));
  return hn::IfThenElseZero(hn::And(ordinary, near), hn::Div(hn::Set(d, 1.0f), s));
}

template <class V>
HWY_INLINE V NearQuotient(V x, V s, V inverse) {
  const auto z = hn::Mul(x, inverse);
  return hn::MulAdd(hn::NegMulAdd(z, s, x), inverse, z);
}

// Infinite and NaN x, and products that overflow.
template <class D>
HWY_INLINE bool AnyNaN(D d, hn::Vec<D> a, hn::Vec<D> b) {
  return !hn::AllFalse(d, hn::IsNaN(hn::Add(a, b)));
}

}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD
#endif
