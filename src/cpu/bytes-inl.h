// Dot products of bytes, four to a lane of 32 bits.
#if defined(BITTERN_CPU_BYTES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_CPU_BYTES_INL_H_
#undef BITTERN_CPU_BYTES_INL_H_
#else
#define BITTERN_CPU_BYTES_INL_H_
#endif

#include "cpu/simd-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {

// sum + u8 * s8 products of whole vectors, in any lane type. kMost: the largest u8 there is; up to
// 127 two products fit 16 bits.
template <int kMost = 255, class VSum, class VA, class VB>
HWY_INLINE VSum DotBytes(VSum sum, VA a, VB b) {
#if HWY_TARGET == HWY_AVX3_DL
  // Not the intrinsic: Highway's options for this target leave out avx512vnni, which dispatch asks
  // the CPU for.
  asm("vpdpbusd %2, %1, %0" : "+v"(sum.raw) : "v"(a.raw), "v"(b.raw));
  return sum;
#elif HWY_TARGET == HWY_AVX3
  if constexpr (kMost <= 127) {
    const __m512i pairs = _mm512_maddubs_epi16(a.raw, b.raw);
    return VSum{_mm512_add_epi32(sum.raw, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))};
  } else {
    const __m512i bytes = _mm512_set1_epi16(255);
    const __m512i even = _mm512_madd_epi16(_mm512_and_si512(a.raw, bytes),
                                           _mm512_srai_epi16(_mm512_slli_epi16(b.raw, 8), 8));
    const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(a.raw, 8), _mm512_srai_epi16(b.raw, 8));
    return VSum{_mm512_add_epi32(sum.raw, _mm512_add_epi32(even, odd))};
  }
#else
  if constexpr (kMost <= 127) {
    const __m256i pairs = _mm256_maddubs_epi16(a.raw, b.raw);
    return VSum{_mm256_add_epi32(sum.raw, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))};
  } else {
    const __m256i bytes = _mm256_set1_epi16(255);
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(a.raw, bytes),
                                           _mm256_srai_epi16(_mm256_slli_epi16(b.raw, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a.raw, 8), _mm256_srai_epi16(b.raw, 8));
    return VSum{_mm256_add_epi32(sum.raw, _mm256_add_epi32(even, odd))};
  }
#endif
}

// The same with four bytes at `b` for every lane.
template <int kMost = 255, class VSum, class VA>
HWY_INLINE VSum DotBytesOf(VSum sum, VA a, const std::int32_t* b) {
#if HWY_TARGET == HWY_AVX3_DL
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum.raw) : "v"(a.raw), "m"(*b));
  return sum;
#elif HWY_TARGET == HWY_AVX3
  return DotBytes<kMost>(sum, a, VSum{_mm512_set1_epi32(*b)});
#else
  return DotBytes<kMost>(sum, a, VSum{_mm256_set1_epi32(*b)});
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif
#endif
