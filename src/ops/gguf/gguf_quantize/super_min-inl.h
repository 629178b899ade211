// Blocks whose groups have a scale and a minimum: Q2_K, Q4_K, Q5_K.
#if defined(BITTERN_OPS_GGUF_QUANTIZE_SUPER_MIN_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_OPS_GGUF_QUANTIZE_SUPER_MIN_INL_H_
#undef BITTERN_OPS_GGUF_QUANTIZE_SUPER_MIN_INL_H_
#else
#define BITTERN_OPS_GGUF_QUANTIZE_SUPER_MIN_INL_H_
#endif

#include <algorithm>
#include <limits>

#include "ops/gguf/gguf_quantize/super_groups-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

// Codes of groups for m and r = 1 / s.
HWY_INLINE Floats Code(const SuperRule& rule, Floats x, Floats m, Floats r) {
  return RoundedTo(hn::Mul(hn::Add(x, m), r), rule.low, rule.high);
}

template <bool kWeighted, int kSize>
void Search(const Batch<kSize>& b, BlockType type, const SuperRule& rule, Ideals& best) {
  const auto zero = hn::Zero(kF), tiny = hn::Set(kF, blocks::kTiny);
  for (int g = 0; g < kGroups; g += kWidth) {
    Floats low, high;
    RangeOf<kWeighted>(b, g, low, high);
    low = hn::Min(low, zero);
    const auto range = hn::Sub(high, low), one = At(b.one + g);
    auto u1 = zero, u2 = zero, x2 = zero;
    alignas(64) float us[kSize][kWidth];
    for (int j = 0; j < kSize; ++j) {
      const auto x = At(b.x[j] + g), u = hn::Sub(x, low), cu = Weigh<kWeighted>(b, j, g, u);
      // Below 0 where a weight does not count.
      hn::Store(kWeighted ? hn::Max(u, zero) : u, kF, us[j]);
      u1 = hn::Add(u1, cu);
      u2 = hn::Add(u2, hn::Mul(cu, u));
      x2 = hn::Add(x2, hn::Mul(Weigh<kWeighted>(b, j, g, x), x));
    }
    auto s_best = hn::Div(range, hn::Set(kF, rule.high)), m_best = hn::Neg(low);
    auto q_best = zero, qq_best = zero;
    auto least = hn::Set(kF, std::numeric_limits<float>::infinity());
    const auto some = hn::Ge(range, tiny);
    for (int k = 0; k < blocks::kStarts; ++k) {
      const auto steps = hn::Set(kF, rule.steps_of_start(k));
      auto m = hn::Neg(low), r = hn::IfThenElseZero(some, hn::Div(steps, range));
      for (int fit = 0; fit < rule.fits; ++fit) {
        auto q1 = zero, q2 = zero, qu = zero;
        const auto add = [&](int j, Floats q) HWY_ATTR {
          const auto t = Weigh<kWeighted>(b, j, g, q);
          q1 = hn::Add(q1, t);
          q2 = hn::Add(q2, hn::Mul(t, q));
          qu = hn::Add(qu, hn::Mul(t, At(us[j])));
        };
        if (fit == 0) {  // no u is below 0
          for (int j = 0; j < kSize; ++j)
            add(j, hn::Min(hn::Round(hn::Mul(At(us[j]), r)), hn::Set(kF, rule.high)));
        } else {
          for (int j = 0; j < kSize; ++j) add(j, Code(rule, At(b.x[j] + g), m, r));
        }
        const auto square = hn::Mul(one, q2), det = hn::Sub(square, hn::Mul(q1, q1));
        const auto line = hn::Gt(det, hn::Mul(hn::Set(kF, blocks::kDegenerate), square));
        auto s = hn::Div(hn::Sub(hn::Mul(one, qu), hn::Mul(q1, u1)), det);
        const auto bias = hn::Div(hn::Sub(hn::Mul(q2, u1), hn::Mul(q1, qu)), det);
        auto error = hn::Sub(u2, hn::Add(hn::Mul(s, qu), hn::Mul(bias, u1)));
        m = hn::Neg(hn::Add(low, bias));
        // A line through 0 instead.
        const auto origin = hn::Lt(m, zero);
        const auto qx = hn::Add(qu, hn::Mul(low, q1)), slope = hn::Div(qx, q2);
        s = hn::IfThenElse(origin, slope, s);
        m = hn::IfThenZeroElse(origin, m);
        error = hn::IfThenElse(origin, hn::Sub(x2, hn::Mul(slope, qx)), error);
        const auto take = hn::And(line, hn::And(hn::Gt(s, zero), hn::Lt(error, least)));
        least = hn::IfThenElse(take, error, least);
        s_best = hn::IfThenElse(take, s, s_best);
        m_best = hn::IfThenElse(take, m, m_best);
        q_best = hn::IfThenElse(take, q1, q_best);
        qq_best = hn::IfThenElse(take, q2, qq_best);
        // Where there is no line, the codes are all 0 from here on: then there is none again.
        const auto on = hn::And(line, hn::Ge(s, tiny));
        m = hn::IfThenElseZero(on, m);
        r = hn::IfThenElseZero(on, hn::Div(hn::Set(kF, 1.0f), s));
      }
    }
    const auto most = hn::Set(kF, largest_weight(type));
    hn::Store(hn::Min(s_best, most), kF, best.s + g);
    hn::Store(hn::Min(m_best, most), kF, best.m + g);
    hn::Store(q_best, kF, best.q + g);
    hn::Store(qq_best, kF, best.qq + g);
  }
}

template <bool kWeighted, int kSize>
void SumCodes(const Batch<kSize>& b, const SuperRule& rule, const float* s, const float* m,
              CodeSums& sums) {
  for (int g = 0; g < kGroups; g += kWidth) {
    const auto r = InverseOrZero(At(s + g)), min = At(m + g);
    auto q1 = hn::Zero(kF), q2 = q1, qx = q1;
    for (int j = 0; j < kSize; ++j) {
      const auto x = At(b.x[j] + g), q = Code(rule, x, min, r), t = Weigh<kWeighted>(b, j, g, q);
      q1 = hn::Add(q1, t);
      q2 = hn::Add(q2, hn::Mul(t, q));
      qx = hn::Add(qx, hn::Mul(t, x));
    }
    hn::Store(q1, kF, sums.q + g);
    hn::Store(q2, kF, sums.qq + g);
    hn::Store(qx, kF, sums.qx + g);
  }
}

// Of each super-block: the step of its groups' values, which are not negative.
HWY_INLINE void FindSteps(const SuperRule& rule, const float* values, const float* weights,
                          float* to) {
  for (int g = 0; g < kGroups; g += rule.groups) {
    const float largest = *std::max_element(values + g, values + g + rule.groups);
    Spread(rule, BestStep(rule, values + g, weights + g, largest), to + g);
  }
}

template <int kSize>
void Fit(const Batch<kSize>& b, BlockType type, const SuperRule& super, const Ideals& ideal,
         Scales& f) {
  const StepRule& rule = super.steps;
  alignas(64) float mean[kGroups], weight[kGroups], m[kGroups];
  const auto zero = hn::Zero(kF);
  for (int g = 0; g < kGroups; g += kWidth) {
    const auto one = At(b.one + g), q = At(ideal.q + g);
    const auto average = hn::IfThenElseZero(hn::Gt(one, zero), hn::Div(q, one));
    hn::Store(average, kF, mean + g);
    hn::Store(hn::Sub(At(ideal.qq + g), hn::Mul(q, average)), kF, weight + g);
  }
  FindSteps(super, ideal.s, weight, f.d);
  const auto most = hn::Set(kF, largest_weight(type));
  for (int g = 0; g < kGroups; g += kWidth) {
    const auto s = At(ideal.s + g), d = At(f.d + g);
    const auto sc = RoundedTo(hn::Mul(s, InverseOrZero(d)), rule.low, rule.high);
    const auto moved = hn::Mul(At(mean + g), hn::Sub(hn::Mul(d, sc), s));
    hn::Store(sc, kF, f.sc + g);
    hn::Store(hn::Min(hn::Max(hn::Add(moved, At(ideal.m + g)), zero), most), kF, m + g);
  }
  FindSteps(super, m, b.one, f.dmin);
  for (int g = 0; g < kGroups; g += kWidth) {
    const auto r = InverseOrZero(At(f.dmin + g));
    hn::Store(RoundedTo(hn::Mul(At(m + g), r), rule.low, rule.high), kF, f.mn + g);
  }
}

template <bool kWeighted, int kSize>
void Refine(const Batch<kSize>& b, const SuperRule& super, Scales& f) {
  const StepRule& rule = super.steps;
  for (int g = 0; g < kGroups; g += kWidth) {
    const auto d = At(f.d + g), dmin = At(f.dmin + g), one = At(b.one + g), sum = At(b.sum_x + g);
    const auto sc_from = At(f.sc + g), mn_from = At(f.mn + g), r_min = InverseOrZero(dmin);
    const auto any = hn::Gt(one, hn::Zero(kF));
    auto least = hn::Set(kF, std::numeric_limits<float>::infinity());
    auto sc_best = sc_from, mn_best = mn_from;
    for (const float move : blocks::kMoves) {
      const auto sc = RoundedTo(hn::Add(sc_from, hn::Set(kF, move)), rule.low, rule.high);
      const auto s = hn::Mul(d, sc), r = InverseOrZero(s);
      auto mn = mn_from;
      for (const bool again : {false, true}) {
        const auto m = hn::Mul(dmin, mn);
        auto error = hn::Zero(kF), q1 = error;
        for (int j = 0; j < kSize; ++j) {
          const auto x = At(b.x[j] + g), q = Code(super, x, m, r);
          const auto e = hn::Sub(x, hn::Sub(hn::Mul(s, q), m));
          error = hn::Add(error, Weigh<kWeighted>(b, j, g, hn::Mul(e, e)));
          q1 = hn::Add(q1, Weigh<kWeighted>(b, j, g, q));
        }
        const auto take = hn::Lt(error, least);
        least = hn::IfThenElse(take, error, least);
        sc_best = hn::IfThenElse(take, sc, sc_best);
        mn_best = hn::IfThenElse(take, mn, mn_best);
        if (again) break;
        const auto wanted = hn::Div(hn::Sub(hn::Mul(s, q1), sum), one);
        mn = hn::IfThenElse(any, RoundedTo(hn::Mul(wanted, r_min), rule.low, rule.high), mn_from);
      }
    }
    hn::Store(least, kF, f.error + g);
    hn::Store(sc_best, kF, f.sc + g);
    hn::Store(mn_best, kF, f.mn + g);
  }
}

// Puts groups [first, first + count) of `from` in place of those of `to`.
HWY_INLINE void CopyGroups(const Scales& from, int first, int count, Scales& to) {
  const auto copy = [&](const float* source, float* target) {
    std::copy(source + first, source + first + count, target + first);
  };
  copy(from.d, to.d);
  copy(from.dmin, to.dmin);
  copy(from.sc, to.sc);
  copy(from.mn, to.mn);
}

// From the groups' ideal grids to the scales of their super-blocks.
template <bool kWeighted, int kSize>
void FitScales(const Batch<kSize>& b, BlockType type, const SuperRule& rule, const Ideals& ideal,
               Scales& best) {
  Fit(b, type, rule, ideal, best);
  Refine<kWeighted>(b, rule, best);
  Scales again = best;
  alignas(64) float s[kGroups], m[kGroups];
  Multiply(best.d, best.sc, s);
  Multiply(best.dmin, best.mn, m);
  CodeSums codes;
  SumCodes<kWeighted>(b, rule, s, m, codes);
  for (int g = 0; g < kGroups; g += rule.groups) {
    blocks::Sums sums[kGroups];
    for (int i = 0; i < rule.groups; ++i)
      sums[i] = {b.one[g + i], b.sum_x[g + i], codes.q[g + i], codes.qq[g + i], codes.qx[g + i]};
    float d = best.d[g], dmin = best.dmin[g];
    blocks::refit(sums, best.sc + g, best.mn + g, rule.groups, d, dmin);
    Spread(rule, d, again.d + g);
    Spread(rule, dmin, again.dmin + g);
  }
  Refine<kWeighted>(b, rule, again);
  for (int g = 0; g < kGroups; g += rule.groups) {
    if (Total(again.error + g, rule.groups) < Total(best.error + g, rule.groups))
      CopyGroups(again, g, rule.groups, best);
  }
}

template <bool kWeighted, int kSize>
void QuantizeSupers(BlockType type, Batch<kSize>& b, Ideals& ideal, bool given,
                    std::uint8_t* const* to, int count) {
  const SuperRule rule = blocks::super_rule(type);
  SumUp<kWeighted>(b);
  if (given) {
    CodeSums codes;
    SumCodes<kWeighted>(b, rule, ideal.s, ideal.m, codes);
    std::copy(codes.q, codes.q + kGroups, ideal.q);
    std::copy(codes.qq, codes.qq + kGroups, ideal.qq);
  } else {
    Search<kWeighted>(b, type, rule, ideal);
  }
  Scales scales;
  FitScales<kWeighted>(b, type, rule, ideal, scales);
  alignas(64) float s[kGroups], m[kGroups];
  Multiply(scales.d, scales.sc, s);
  Multiply(scales.dmin, scales.mn, m);
  alignas(64) std::uint8_t codes[kGroups][kSize];
  EachCode([&](int j, int g)
               HWY_ATTR { return Code(rule, At(b.x[j] + g), At(m + g), InverseOrZero(At(s + g))); },
           codes);
  for (int i = 0; i < count; ++i)
    PutBlock(type, codes[rule.groups * i], scales, rule.groups * i, to[i]);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD
#endif
