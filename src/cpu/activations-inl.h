// core/activations.h in SIMD, the same operations line by line, so the same bits.
#if defined(BITTERN_CPU_ACTIVATIONS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_CPU_ACTIVATIONS_INL_H_
#undef BITTERN_CPU_ACTIVATIONS_INL_H_
#else
#define BITTERN_CPU_ACTIVATIONS_INL_H_
#endif

#include "core/activations.h"
#include "cpu/math-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {

template <class D>
HWY_INLINE hn::Vec<D> GeluTanh(D d, hn::Vec<D> x) {
  const auto u = hn::Mul(x, hn::MulAdd(hn::Mul(x, x), hn::Set(d, math::kGeluTanhCubic),
                                       hn::Set(d, math::kGeluTanhLinear)));
  return hn::Mul(x, Sigmoid(d, u));
}

template <class D>
HWY_INLINE hn::Vec<D> Gelu(D d, hn::Vec<D> x) {
  const auto set = [d](float c) HWY_ATTR { return hn::Set(d, c); };
  const auto most = set(math::kGeluMost), middle = set(math::kGeluMiddle);
  auto t = hn::Abs(x);
  t = hn::IfThenElse(hn::Gt(t, most), most, t);
  const auto q = hn::Div(hn::Sub(t, middle), hn::Add(t, middle));
  auto p = set(math::gelu_term(9));
  for (int i = 8; i >= 0; --i) p = hn::MulAdd(p, q, set(math::gelu_term(i)));
  const auto half = hn::Mul(set(-0.5f), t);
  const auto square = hn::Mul(half, t);
  const auto lost = hn::MulSub(half, t, square);
  const auto tail = hn::Mul(Exp(d, square, lost), p);
  const auto below = hn::Lt(x, hn::Zero(d));
  return hn::Mul(x, hn::IfThenElse(below, tail, hn::Sub(set(1.0f), tail)));
}

}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif
#endif
