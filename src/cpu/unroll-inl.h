// Loops that are unrolled by the language, so that arrays of vectors stay in registers.
#if defined(BITTERN_CPU_UNROLL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_CPU_UNROLL_INL_H_
#undef BITTERN_CPU_UNROLL_INL_H_
#else
#define BITTERN_CPU_UNROLL_INL_H_
#endif

#include <utility>

#include "cpu/simd-inl.h"

// On a lambda that keeps vectors in registers.
#undef BITTERN_INLINE_LAMBDA
#define BITTERN_INLINE_LAMBDA HWY_ATTR __attribute__((always_inline))

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {

// f(0), f(1), ... f(n - 1), where the arguments are constant expressions.
template <class F, int... i>
HWY_INLINE void UnrollOver(std::integer_sequence<int, i...>, F&& f) {
  (f(std::integral_constant<int, i>()), ...);
}
template <int n, class F>
HWY_INLINE void Unroll(F&& f) {
  UnrollOver(std::make_integer_sequence<int, n>(), f);
}

}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif
#endif
