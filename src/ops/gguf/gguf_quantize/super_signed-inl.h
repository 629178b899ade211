// Blocks whose groups have a scale of either sign and no minimum: Q3_K, Q6_K.
#if defined(BITTERN_OPS_GGUF_QUANTIZE_SUPER_SIGNED_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_OPS_GGUF_QUANTIZE_SUPER_SIGNED_INL_H_
#undef BITTERN_OPS_GGUF_QUANTIZE_SUPER_SIGNED_INL_H_
#else
#define BITTERN_OPS_GGUF_QUANTIZE_SUPER_SIGNED_INL_H_
#endif

#include <cmath>
#include <limits>

#include "ops/gguf/gguf_quantize/super_groups-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

HWY_INLINE Floats SignedCode(const SuperRule& rule, Floats x, Floats r) {
  return RoundedTo(hn::Mul(x, r), rule.low, rule.high);
}

template <bool kWeighted>
HWY_INLINE void SumSignedCodes(const Batch<16>& b, const SuperRule& rule, int g, Floats r,
                               Floats& qq, Floats& qx) {
  qq = hn::Zero(kF);
  qx = qq;
  for (int j = 0; j < 16; ++j) {
    const auto x = At(b.x[j] + g), q = SignedCode(rule, x, r), t = Weigh<kWeighted>(b, j, g, q);
    qq = hn::Add(qq, hn::Mul(t, q));
    qx = hn::Add(qx, hn::Mul(t, x));
  }
}

template <bool kWeighted>
void SearchSigned(const Batch<16>& b, const SuperRule& rule, Ideals& best) {
  const auto zero = hn::Zero(kF);
  for (int g = 0; g < kGroups; g += kWidth) {
    Floats low, high;
    RangeOf<kWeighted>(b, g, low, high);
    const auto largest = hn::IfThenElse(hn::Gt(high, hn::Neg(low)), high, low);
    const auto some = hn::Ge(hn::Abs(largest), hn::Set(kF, blocks::kTiny));
    auto s_best = zero, qq_best = zero, most = zero;
    for (int end = 0; end < rule.ends; ++end) {
      for (int k = 0; k < blocks::kStarts; ++k) {
        const float count = rule.steps_of_start(k);
        const auto steps = hn::Set(kF, end == 0 ? -count : count);
        Floats qq, qx;
        SumSignedCodes<kWeighted>(b, rule, g, hn::IfThenElseZero(some, hn::Div(steps, largest)), qq,
                                  qx);
        const auto s = hn::Div(qx, qq), gain = hn::Mul(qx, s);
        const auto take = hn::And(hn::Gt(qq, zero), hn::Gt(gain, most));
        most = hn::IfThenElse(take, gain, most);
        s_best = hn::IfThenElse(take, s, s_best);
        qq_best = hn::IfThenElse(take, qq, qq_best);
      }
    }
    hn::Store(s_best, kF, best.s + g);
    hn::Store(qq_best, kF, best.qq + g);
  }
}

template <bool kWeighted>
void RefineSigned(const Batch<16>& b, const SuperRule& super, Scales& f) {
  const StepRule& rule = super.steps;
  for (int g = 0; g < kGroups; g += kWidth) {
    const auto d = At(f.d + g), sc_from = At(f.sc + g);
    auto least = hn::Set(kF, std::numeric_limits<float>::infinity()), sc_best = sc_from;
    for (const float move : blocks::kMoves) {
      const auto sc = RoundedTo(hn::Add(sc_from, hn::Set(kF, move)), rule.low, rule.high);
      const auto s = hn::Mul(d, sc), r = InverseOrZero(s);
      auto error = hn::Zero(kF);
      for (int j = 0; j < 16; ++j) {
        const auto x = At(b.x[j] + g), e = hn::Sub(x, hn::Mul(s, SignedCode(super, x, r)));
        error = hn::Add(error, Weigh<kWeighted>(b, j, g, hn::Mul(e, e)));
      }
      const auto take = hn::Lt(error, least);
      least = hn::IfThenElse(take, error, least);
      sc_best = hn::IfThenElse(take, sc, sc_best);
    }
    hn::Store(least, kF, f.error + g);
    hn::Store(sc_best, kF, f.sc + g);
  }
}

template <bool kWeighted>
void QuantizeSigned(BlockType type, const Batch<16>& b, std::uint8_t* block) {
  const SuperRule super = blocks::super_rule(type);
  const StepRule& rule = super.steps;
  Ideals ideal;
  SearchSigned<kWeighted>(b, super, ideal);
  float largest = 0;
  for (const float s : ideal.s)
    if (std::abs(s) > std::abs(largest)) largest = s;
  Scales best = {};
  const float step = BestStep(super, ideal.s, ideal.qq, largest);
  Spread(super, step, best.d);
  for (int g = 0; g < kGroups; g += kWidth) {
    const auto z = hn::Mul(At(ideal.s + g), InverseOrZero(At(best.d + g)));
    hn::Store(RoundedTo(z, rule.low, rule.high), kF, best.sc + g);
  }
  RefineSigned<kWeighted>(b, super, best);
  CodeSums codes;
  for (int g = 0; g < kGroups; g += kWidth) {
    Floats qq, qx;
    const auto s = hn::Mul(At(best.d + g), At(best.sc + g));
    SumSignedCodes<kWeighted>(b, super, g, InverseOrZero(s), qq, qx);
    hn::Store(qq, kF, codes.qq + g);
    hn::Store(qx, kF, codes.qx + g);
  }
  blocks::Sums sums[kGroups];
  for (int g = 0; g < kGroups; ++g) sums[g] = {0, 0, 0, codes.qq[g], codes.qx[g]};
  Scales again = best;
  float d = step;
  blocks::refit_signed(sums, best.sc, super.groups, d);
  Spread(super, d, again.d);
  RefineSigned<kWeighted>(b, super, again);
  const Scales& chosen = Total(again.error, kGroups) < Total(best.error, kGroups) ? again : best;
  alignas(64) float s[kGroups];
  Multiply(chosen.d, chosen.sc, s);
  alignas(64) std::uint8_t q[kGroups][16];
  EachCode(
      [&](int j, int g) HWY_ATTR {
        const auto code = SignedCode(super, At(b.x[j] + g), InverseOrZero(At(s + g)));
        return hn::Sub(code, hn::Set(kF, super.low));
      },
      q);
  PutBlock(type, q[0], chosen, 0, block);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD
#endif
