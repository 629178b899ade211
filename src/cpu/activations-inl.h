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
HWY_INLINE hn::Vec<D> GeluTanhGate(D d, hn::Vec<D> x) {
  return Sigmoid(d, hn::Mul(x, hn::MulAdd(hn::Mul(x, x), hn::Set(d, math::kGeluTanhCubic),
                                          hn::Set(d, math::kGeluTanhLinear))));
}
template <class D>
HWY_INLINE hn::Vec<D> GeluTanh(D d, hn::Vec<D> x) {
  return hn::Mul(x, GeluTanhGate(d, x));
}

template <class D>
HWY_INLINE hn::Vec<D> GeluTanhSlope(D d, hn::Vec<D> x, hn::Vec<D> gate) {
  const auto set = [d](float c) HWY_ATTR { return hn::Set(d, c); };
  const auto most = set(math::kGeluTanhMost), one = set(1.0f);
  auto t = hn::Abs(x);
  t = hn::CopySignToAbs(hn::IfThenElse(hn::Gt(t, most), most, t), x);
  const auto slope =
      hn::Mul(t, hn::MulAdd(hn::Mul(t, t), set(math::kGeluTanhSlope), set(math::kGeluTanhLinear)));
  return hn::Mul(gate, hn::MulAdd(slope, hn::Sub(one, gate), one));
}

template <class V>
struct GeluParts {
  V t, bell, below;
};
template <class D>
HWY_INLINE void SplitGelu(D d, hn::Vec<D> x, GeluParts<hn::Vec<D>>& out) {
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
  out.t = t;
  out.bell = Exp(d, square, lost);
  const auto tail = hn::Mul(out.bell, p);
  out.below = hn::IfThenElse(hn::Lt(x, hn::Zero(d)), tail, hn::Sub(set(1.0f), tail));
}
template <class D>
HWY_INLINE hn::Vec<D> Gelu(D d, hn::Vec<D> x) {
  GeluParts<hn::Vec<D>> parts;
  SplitGelu(d, x, parts);
  return hn::Mul(x, parts.below);
}

template <class D>
HWY_INLINE hn::Vec<D> GeluSlope(D d, hn::Vec<D> x, const GeluParts<hn::Vec<D>>& parts) {
  const auto density = hn::Mul(hn::Set(d, math::kInverseRootTwoPi), parts.bell);
  return hn::MulAdd(hn::CopySignToAbs(parts.t, x), density, parts.below);
}

}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif
#endif
