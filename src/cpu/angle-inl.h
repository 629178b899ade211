// core/angle.h in SIMD, the same operations line by line, so the same bits.
#if defined(BITTERN_CPU_ANGLE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_CPU_ANGLE_INL_H_
#undef BITTERN_CPU_ANGLE_INL_H_
#else
#define BITTERN_CPU_ANGLE_INL_H_
#endif

#include "core/angle.h"
#include "cpu/simd-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {

template <class D>
HWY_INLINE void CosSin(D d, hn::Vec<D> a, hn::Vec<D>& cosine, hn::Vec<D>& sine) {
  const hn::RebindToUnsigned<D> du;
  const auto set = [d](double c) HWY_ATTR { return hn::Set(d, c); };
  a = hn::IfThenElse(hn::Lt(hn::Abs(a), set(angle::kMost)), a, hn::NaN(d));
  const auto rounder = set(angle::kRounder);
  const auto shifted = hn::MulAdd(a, set(angle::kTwoOverPi), rounder);
  const auto k = hn::Sub(shifted, rounder);
  auto r = hn::MulAdd(k, set(-angle::kHalfPiHigh), a);
  r = hn::MulAdd(k, set(-angle::kHalfPiLow), r);
  const auto r2 = hn::Mul(r, r);
  auto s = set(angle::sin_term(4));
  for (int i = 3; i >= 0; --i) s = hn::MulAdd(s, r2, set(angle::sin_term(i)));
  s = hn::MulAdd(hn::Mul(r, r2), s, r);
  auto c = set(angle::cos_term(5));
  for (int i = 4; i >= 0; --i) c = hn::MulAdd(c, r2, set(angle::cos_term(i)));
  c = hn::MulAdd(c, r2, set(1.0));
  // The lowest bit of `quarter` swaps; the second one, as a sign, negates.
  const auto quarter = hn::BitCast(du, shifted);
  const auto swap = hn::RebindMask(d, hn::TestBit(quarter, hn::Set(du, std::uint64_t{1})));
  const auto sign = [&](auto bits) HWY_ATTR {
    return hn::BitCast(d, hn::ShiftLeft<62>(hn::And(bits, hn::Set(du, std::uint64_t{2}))));
  };
  cosine =
      hn::Xor(hn::IfThenElse(swap, s, c), sign(hn::Add(quarter, hn::Set(du, std::uint64_t{1}))));
  sine = hn::Xor(hn::IfThenElse(swap, c, s), sign(quarter));
}

}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif
#endif
