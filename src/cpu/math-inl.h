// core/math.h in SIMD, the same operations line by line, so the same bits.
#if defined(BITTERN_CPU_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_CPU_MATH_INL_H_
#undef BITTERN_CPU_MATH_INL_H_
#else
#define BITTERN_CPU_MATH_INL_H_
#endif

#include "core/math.h"
#include "cpu/simd-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {

// Powers of two by an instruction of AVX-512: v 2^n, rounded once, as the two products below are.
template <class D>
inline constexpr bool kScales = HWY_TARGET <= HWY_AVX3 && hn::MaxLanes(D()) == 16;

template <class V>
struct ExpParts {
  V high, low;
  V n, two_n0, two_n1;  // n with kScales, otherwise its powers
};

// v 2^n
template <class D>
HWY_INLINE hn::Vec<D> Scaled(D, hn::Vec<D> v, const ExpParts<hn::Vec<D>>& e) {
#if HWY_TARGET <= HWY_AVX3
  if constexpr (kScales<D>) return hn::Vec<D>{_mm512_scalef_ps(v.raw, e.n.raw)};
#endif
  return hn::Mul(hn::Mul(v, e.two_n0), e.two_n1);
}

template <class D>
HWY_INLINE void SplitExp(D d, hn::Vec<D> shifted, hn::Vec<D> r, ExpParts<hn::Vec<D>>& out) {
  const hn::RebindToSigned<D> di;
  const auto set = [d](float c) HWY_ATTR { return hn::Set(d, c); };
  auto q = hn::MulAdd(set(math::exp_term(4)), r, set(math::exp_term(3)));
  q = hn::MulAdd(q, r, set(math::exp_term(2)));
  q = hn::MulAdd(q, r, set(math::exp_term(1)));
  q = hn::MulAdd(q, r, set(math::exp_term(0)));
  const auto one = set(1.0f);
  const auto line = hn::Add(one, r);
  const auto tail = hn::MulAdd(hn::Mul(r, r), q, hn::Sub(r, hn::Sub(line, one)));
  out.high = hn::Add(line, tail);
  out.low = hn::Sub(tail, hn::Sub(out.high, line));
  if constexpr (kScales<D>) {
    out.n = hn::Sub(shifted, set(math::kRounder));
    return;
  }
  const auto whole = hn::Sub(hn::BitCast(di, shifted), hn::BitCast(di, set(math::kRounder)));
  const auto half = hn::ShiftRight<1>(whole);
  const auto bias = hn::Set(di, 127);
  const auto power = [&](auto k)
                         HWY_ATTR { return hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(k, bias))); };
  out.two_n0 = power(half);
  out.two_n1 = power(hn::Sub(whole, half));
}

template <class D>
HWY_INLINE hn::Vec<D> ClampExp(D d, hn::Vec<D> x, float least) {
  const auto most = hn::Set(d, math::kExpMost), lowest = hn::Set(d, least);
  x = hn::IfThenElse(hn::Gt(x, most), most, x);
  return hn::IfThenElse(hn::Lt(x, lowest), lowest, x);
}

// `x` is within the limits of ClampExp, or NaN.
template <class D>
HWY_INLINE void SplitExp(D d, hn::Vec<D> x, ExpParts<hn::Vec<D>>& out) {
  const auto set = [d](float c) HWY_ATTR { return hn::Set(d, c); };
  const auto rounder = set(math::kRounder);
  const auto shifted = hn::MulAdd(x, set(math::kLog2E), rounder);
  const auto n = hn::Sub(shifted, rounder);
  auto r = hn::MulAdd(n, set(-math::kLn2High), x);
  r = hn::MulAdd(n, set(-math::kLn2Low), r);
  SplitExp(d, shifted, r, out);
}

template <class D>
HWY_INLINE hn::Vec<D> Exp(D d, hn::Vec<D> x) {
  ExpParts<hn::Vec<D>> e;
  SplitExp(d, ClampExp(d, x, math::kExpLeast), e);
  return Scaled(d, e.high, e);
}

template <class D>
HWY_INLINE hn::Vec<D> Exp(D d, hn::Vec<D> x, hn::Vec<D> low) {
  const auto set = [d](float c) HWY_ATTR { return hn::Set(d, c); };
  x = ClampExp(d, x, math::kExpLeastHigh);
  const auto rounder = set(math::kRounder);
  const auto shifted = hn::MulAdd(hn::Add(x, low), set(math::kLog2E), rounder);
  const auto n = hn::Sub(shifted, rounder);
  const auto tail = hn::MulAdd(n, set(-math::kLn2Low), low);
  const auto r = hn::Add(hn::MulAdd(n, set(-math::kLn2High), x), tail);
  ExpParts<hn::Vec<D>> e;
  SplitExp(d, shifted, r, e);
  return Scaled(d, e.high, e);
}

template <class D>
HWY_INLINE hn::Vec<D> Sigmoid(D d, hn::Vec<D> x) {
  ExpParts<hn::Vec<D>> parts;
  const auto minus = hn::Or(x, hn::SignBit(d)), least = hn::Set(d, math::kExpLeast);
  SplitExp(d, hn::IfThenElse(hn::Lt(minus, least), least, minus), parts);
  const auto e = Scaled(d, parts.high, parts);
  const auto e_low = Scaled(d, parts.low, parts);
  const auto one = hn::Set(d, 1.0f);
  const auto divisor = hn::Add(one, e);
  const auto divisor_low = hn::Add(hn::Add(hn::Sub(one, divisor), e), e_low);
  const auto inverse = hn::Div(one, divisor);
  const auto negative = hn::Lt(x, hn::Zero(d));
  const auto a = hn::IfThenElse(negative, e, one);
  const auto a_low = hn::IfThenElseZero(negative, e_low);
  const auto quotient = hn::Mul(a, inverse);
  auto rest = hn::NegMulAdd(quotient, divisor, a);
  rest = hn::NegMulAdd(quotient, divisor_low, rest);
  rest = hn::Add(rest, a_low);
  return hn::MulAdd(rest, inverse, quotient);
}

template <class D>
HWY_INLINE hn::Vec<D> Silu(D d, hn::Vec<D> x) {
  return hn::Mul(x, Sigmoid(d, x));
}

template <class D>
HWY_INLINE hn::Vec<D> SiluSlope(D d, hn::Vec<D> x, hn::Vec<D> sigmoid_of_x) {
  const auto one = hn::Set(d, 1.0f);
  return hn::Mul(sigmoid_of_x, hn::MulAdd(x, hn::Sub(one, sigmoid_of_x), one));
}

template <class D>
HWY_INLINE hn::Vec<D> Tanh(D d, hn::Vec<D> x) {
  const auto set = [d](float c) HWY_ATTR { return hn::Set(d, c); };
  const auto a = hn::Abs(x);
  const auto square = hn::Mul(a, a);
  auto p = hn::MulAdd(set(math::tanh_term(4)), square, set(math::tanh_term(3)));
  p = hn::MulAdd(p, square, set(math::tanh_term(2)));
  p = hn::MulAdd(p, square, set(math::tanh_term(1)));
  p = hn::MulAdd(p, square, set(math::tanh_term(0)));
  const auto near = hn::MulAdd(hn::Mul(a, square), p, a);
  const auto e = Exp(d, hn::Add(a, a));
  const auto one = set(1.0f);
  const auto far = hn::Sub(one, hn::Div(set(2.0f), hn::Add(e, one)));
  return hn::CopySignToAbs(hn::IfThenElse(hn::Lt(a, set(math::kTanhSmall)), near, far), x);
}

template <class D>
HWY_INLINE hn::Vec<D> Exp64(D d, hn::Vec<D> x) {
  const hn::RebindToUnsigned<D> du;
  const auto set = [d](double c) HWY_ATTR { return hn::Set(d, c); };
  const auto most = set(math::kExpMost64), least = set(math::kExpLeast64);
  const auto below = hn::Lt(x, least);
  auto t = hn::IfThenElse(hn::Gt(x, most), most, x);
  t = hn::IfThenElse(below, least, t);
  const auto rounder = set(math::kRounder64);
  const auto shifted = hn::MulAdd(t, set(math::kLog2E64), rounder);
  const auto n = hn::Sub(shifted, rounder);
  auto r = hn::MulAdd(n, set(-math::kLn264), t);
  r = hn::MulAdd(n, set(-math::kLn264Low), r);
  auto p = set(math::exp_term64(13));
  for (int i = 12; i >= 0; --i) p = hn::MulAdd(p, r, set(math::exp_term64(i)));
  const auto whole = hn::Sub(hn::BitCast(du, shifted), hn::BitCast(du, rounder));
  const auto power = hn::ShiftLeft<52>(hn::Add(whole, hn::Set(du, std::uint64_t{1023})));
  return hn::IfThenZeroElse(below, hn::Mul(p, hn::BitCast(d, power)));
}

template <class D>
HWY_INLINE hn::Vec<D> Softplus(D d, hn::Vec<D> x) {
  const auto set = [d](float c) HWY_ATTR { return hn::Set(d, c); };
  const auto square = hn::Mul(x, x), half = set(0.5f), ln2 = set(math::kLn2);
  auto q = set(math::softplus_near_term(4));
  for (int i = 3; i >= 0; --i) q = hn::MulAdd(q, square, set(math::softplus_near_term(i)));
  const auto line = hn::MulAdd(half, x, ln2);
  const auto lost = hn::Add(hn::MulAdd(half, x, hn::Sub(ln2, line)), set(math::kLn2Rest));
  const auto near = hn::Add(line, hn::MulAdd(square, q, lost));
  ExpParts<hn::Vec<D>> parts;
  const auto minus = hn::Or(x, hn::SignBit(d)), least = set(math::kExpLeast);
  SplitExp(d, hn::IfThenElse(hn::Lt(minus, least), least, minus), parts);
  const auto e = Scaled(d, parts.high, parts);
  const auto e_low = Scaled(d, parts.low, parts);
  auto p = set(math::softplus_far_term(6));
  for (int i = 5; i >= 0; --i) p = hn::MulAdd(p, e, set(math::softplus_far_term(i)));
  const auto log1p_e = hn::Add(e, hn::MulAdd(hn::Mul(e, e), p, hn::NegMulAdd(e, e_low, e_low)));
  const auto far = hn::Add(hn::IfThenElseZero(hn::Gt(x, hn::Zero(d)), x), log1p_e);
  const auto y = hn::IfThenElse(hn::Lt(hn::Abs(x), set(1.0f)), near, far);
  return hn::IfThenElse(hn::Gt(x, set(math::kSoftplusLinear)), x, y);
}

}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif
#endif
