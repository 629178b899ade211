// The blocks of 256 weights: 16 groups at a time, a group per lane.
//
// So a sum over a group is a loop over its weights in their order, as in ref, whatever the width
// of a vector. 16 groups are two super-blocks of Q4_K and Q5_K, or one of the other types.
#include <algorithm>
#include <limits>
#include <numeric>

#include "bittern/ops/gguf_quantize.h"
#include "cpu/dispatch.h"
#include "cpu/parallel.h"
#include "ops/gguf/gguf_quantize/block_rules.h"
#include "ops/gguf/gguf_quantize/super_block.h"
#include "plan/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/gguf/gguf_quantize/super_block_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "ops/gguf/gguf_quantize/weights-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = GgufQuantize;
using blocks::StepRule;
using blocks::SuperRule;

constexpr int kGroups = 16;

HWY_INLINE Floats At(const float* lanes) { return hn::Load(kF, lanes); }
HWY_INLINE Floats InverseOrZero(Floats x) {
  return hn::IfThenElseZero(hn::Ne(x, hn::Zero(kF)), hn::Div(hn::Set(kF, 1.0f), x));
}
HWY_INLINE Floats RoundedTo(Floats x, float low, float high) {
  return hn::Min(hn::Max(hn::Round(x), hn::Set(kF, low)), hn::Set(kF, high));
}

// Weights and importance, [j][group]; what the search finds; sums over the codes.
template <int kSize>
struct Batch {
  alignas(64) float x[kSize][kGroups];
  alignas(64) float c[kSize][kGroups];
  alignas(64) float one[kGroups], sum_x[kGroups];
};
struct Ideals {
  alignas(64) float s[kGroups], m[kGroups], q[kGroups], qq[kGroups];
};
struct Scales {
  alignas(64) float d[kGroups], dmin[kGroups], sc[kGroups], mn[kGroups], error[kGroups];
};
struct CodeSums {
  alignas(64) float q[kGroups], qq[kGroups], qx[kGroups];
};

// v times the importance of weight j.
template <bool kWeighted, int kSize>
HWY_INLINE Floats Weigh(const Batch<kSize>& b, int j, int g, Floats v) {
  return kWeighted ? hn::Mul(At(b.c[j] + g), v) : v;
}

template <bool kWeighted, int kSize>
void SumUp(Batch<kSize>& b) {
  for (int g = 0; g < kGroups; g += kWidth) {
    auto one = hn::Zero(kF), x = one;
    for (int j = 0; j < kSize; ++j) {
      one = hn::Add(one, kWeighted ? At(b.c[j] + g) : hn::Set(kF, 1.0f));
      x = hn::Add(x, Weigh<kWeighted>(b, j, g, At(b.x[j] + g)));
    }
    hn::Store(one, kF, b.one + g);
    hn::Store(x, kF, b.sum_x + g);
  }
}

// The least and the greatest weight of groups that has an importance; of all, where none has.
template <bool kWeighted, int kSize>
HWY_INLINE void RangeOf(const Batch<kSize>& b, int g, Floats& low, Floats& high) {
  const auto infinity = hn::Set(kF, std::numeric_limits<float>::infinity());
  auto most = hn::Zero(kF);
  for (int j = 0; kWeighted && j < kSize; ++j) most = hn::Max(most, At(b.c[j] + g));
  const auto none = hn::Eq(most, hn::Zero(kF));
  low = infinity;
  high = hn::Neg(infinity);
  for (int j = 0; j < kSize; ++j) {
    const auto x = At(b.x[j] + g);
    if constexpr (kWeighted) {
      const auto counts = hn::Or(none, hn::Gt(At(b.c[j] + g), hn::Zero(kF)));
      low = hn::Min(low, hn::IfThenElse(counts, x, infinity));
      high = hn::Max(high, hn::IfThenElse(counts, x, hn::Neg(infinity)));
    } else {
      low = hn::Min(low, x);
      high = hn::Max(high, x);
    }
  }
}

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

// The step whose multiples are nearest to the values, by weight: a lane per try.
HWY_INLINE float BestStep(const SuperRule& super, const float* values, const float* weights,
                          float largest) {
  const StepRule& rule = super.steps;
  static_assert(blocks::kStepTries % kWidth == 0);
  alignas(64) float steps[blocks::kStepTries], errors[blocks::kStepTries];
  const auto half = hn::Set(kF, kLargestHalf);
  largest += 0.0f;
  for (int k = 0; k < blocks::kStepTries; k += kWidth) {
    const auto parts = hn::Add(hn::Set(kF, rule.top), hn::Mul(hn::Set(kF, rule.toward),
                                                              hn::Iota(kF, static_cast<float>(k))));
    const auto step = RoundMath<f16>(
        kF, hn::Min(hn::Max(hn::Div(hn::Set(kF, largest), parts), hn::Neg(half)), half));
    const auto r = InverseOrZero(step);
    auto error = hn::Zero(kF);
    for (int g = 0; g < super.groups; ++g) {
      const auto value = hn::Set(kF, values[g]);
      const auto e =
          hn::Sub(hn::Mul(step, RoundedTo(hn::Mul(value, r), rule.low, rule.high)), value);
      error = hn::Add(error, hn::Mul(hn::Set(kF, weights[g]), hn::Mul(e, e)));
    }
    hn::Store(step, kF, steps + k);
    hn::Store(error, kF, errors + k);
  }
  return steps[std::min_element(errors, errors + blocks::kStepTries) - errors];
}

// The groups of a super-block all have its d.
HWY_INLINE void Spread(const SuperRule& rule, float value, float* to) {
  std::fill(to, to + rule.groups, value);
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

// products[g] = steps[g] * multiples[g]
HWY_INLINE void Multiply(const float* steps, const float* multiples, float* products) {
  for (int g = 0; g < kGroups; g += kWidth)
    hn::Store(hn::Mul(At(steps + g), At(multiples + g)), kF, products + g);
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

HWY_INLINE float Total(const float* errors, int count) {
  return std::accumulate(errors, errors + count, 0.0f);
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

// codes[group][j]
template <int kSize, class F>
HWY_INLINE void EachCode(const F& code, std::uint8_t (&codes)[kGroups][kSize]) {
  const hn::Rebind<std::uint8_t, decltype(kF)> d8;
  alignas(64) std::uint8_t lanes[kWidth];
  for (int g = 0; g < kGroups; g += kWidth) {
    for (int j = 0; j < kSize; ++j) {
      hn::Store(hn::DemoteTo(d8, hn::ConvertTo(kI, code(j, g))), d8, lanes);
      for (int i = 0; i < kWidth; ++i) codes[g + i][j] = lanes[i];
    }
  }
}

// The 256 codes of a super-block, counted from 0, in the order of their weights.
HWY_INLINE void PutCodes(BlockType type, const std::uint8_t* q, std::uint8_t* block) {
  const auto part = [&](int i) HWY_ATTR { return hn::LoadU(kBytes, q + 32 * i); };
  // Bit kBit of all codes: that of weights 32 i .. 32 i + 31 is bit i of a byte.
  const auto bits = [&]<int kBit>(std::integral_constant<int, kBit>) HWY_ATTR {
    auto all = hn::Zero(kBytes);
    for (int i = 7; i >= 0; --i) {
      const auto bit = hn::And(hn::ShiftRight<kBit>(part(i)), hn::Set(kBytes, std::uint8_t{1}));
      all = hn::Or(hn::Add(all, all), bit);
    }
    return all;
  };
  // Bits kFrom, kFrom + 1 of weights 128 h .. 128 h + 127, four to a byte.
  const auto pairs = [&]<int kFrom>(int h, std::integral_constant<int, kFrom>) HWY_ATTR {
    const auto pair = [&](int k) HWY_ATTR {
      return hn::And(hn::ShiftRight<kFrom>(part(4 * h + k)), hn::Set(kBytes, std::uint8_t{3}));
    };
    return hn::Or(hn::Or(pair(0), hn::ShiftLeft<2>(pair(1))),
                  hn::Or(hn::ShiftLeft<4>(pair(2)), hn::ShiftLeft<6>(pair(3))));
  };
  const auto halves = [&](int i, int k) HWY_ATTR {
    return hn::Or(hn::And(part(i), hn::Set(kBytes, std::uint8_t{15})), hn::ShiftLeft<4>(part(k)));
  };
  constexpr std::integral_constant<int, 0> k0;
  constexpr std::integral_constant<int, 2> k2;
  constexpr std::integral_constant<int, 4> k4;
  switch (type) {
    case BlockType::q3_k: hn::StoreU(bits(k2), kBytes, block); [[fallthrough]];
    case BlockType::q2_k:
      for (int h = 0; h < 2; ++h)
        hn::StoreU(pairs(h, k0), kBytes, block + (type == BlockType::q2_k ? 16 : 32) + 32 * h);
      break;
    case BlockType::q5_k: hn::StoreU(bits(k4), kBytes, block + 16); [[fallthrough]];
    case BlockType::q4_k:
      for (int i = 0; i < 8; i += 2)
        hn::StoreU(halves(i, i + 1), kBytes, block + (type == BlockType::q4_k ? 16 : 48) + 16 * i);
      break;
    default:  // Q6_K
      for (int h = 0; h < 2; ++h) {
        hn::StoreU(halves(4 * h, 4 * h + 2), kBytes, block + 64 * h);
        hn::StoreU(halves(4 * h + 1, 4 * h + 3), kBytes, block + 64 * h + 32);
        hn::StoreU(pairs(h, k4), kBytes, block + 128 + 32 * h);
      }
  }
}

HWY_INLINE void PutBlock(BlockType type, const std::uint8_t* q, const Scales& f, int g,
                         std::uint8_t* block) {
  std::memset(block, 0, static_cast<std::size_t>(block_size(type).bytes));
  blocks::put_scales(type, f.sc + g, f.mn + g, f.d[g], f.dmin[g], block);
  PutCodes(type, q, block);
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

// ---- a scale of either sign and no minimum: Q3_K, Q6_K ----

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

// Super-block i of all rows: its weights into groups [first, ...) of the batch.
template <int kSize>
void Gather(const Op::Desc& d, const Op::Args& a, std::int64_t i, int first, Batch<kSize>& b) {
  const std::int64_t row = i / d.row_blocks(), column = i % d.row_blocks() * 256;
  const auto most = hn::Set(kF, largest_weight(d.type));
  alignas(64) float x[256];
  (void)visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    const X* w = a.w.as<X>() + row * a.w.row_stride() + column;
    PrefetchNext(w, 256);
    for (int j = 0; j < 256; j += kWidth) hn::Store(LoadWeights(w + j, most), kF, x + j);
    return Status();
  });
  for (int g = 0; g < 256 / kSize; ++g)
    for (int j = 0; j < kSize; ++j) b.x[j][first + g] = x[g * kSize + j];
  if (!a.importance) return;
  const float* importance = a.importance.as<float>() + column;
  for (int g = 0; g < 256 / kSize; ++g)
    for (int j = 0; j < kSize; ++j)
      b.c[j][first + g] = blocks::weight_of(importance[g * kSize + j]);
}

std::uint8_t* BlockAt(const Op::Desc& d, const Op::Args& a, std::int64_t i) {
  return a.blocks.as<std::uint8_t>() + i / d.row_blocks() * a.blocks.row_stride() +
         i % d.row_blocks() * block_size(d.type).bytes;
}

// Super-blocks [begin, end), counted through all rows.
template <bool kWeighted>
void QuantizeAllSigned(const Op::Desc& d, const Op::Args& a, std::int64_t begin, std::int64_t end) {
  Batch<16> b;
  for (std::int64_t i = begin; i < end; ++i) {
    Gather(d, a, i, 0, b);
    QuantizeSigned<kWeighted>(d.type, b, BlockAt(d, a, i));
  }
}

template <bool kWeighted, int kSize>
void QuantizeAll(const Op::Desc& d, const Op::Args& a, std::int64_t begin, std::int64_t end) {
  constexpr int kInBlock = 256 / kSize, kAtOnce = kGroups / kInBlock;
  const SuperRule rule = blocks::super_rule(d.type);
  Batch<kSize> b = {};
  Ideals ideal = {};
  for (std::int64_t i = begin; i < end; i += kAtOnce) {
    const int count = static_cast<int>(std::min<std::int64_t>(end - i, kAtOnce));
    std::uint8_t* to[kAtOnce] = {};
    for (int k = 0; k < count; ++k) {
      Gather(d, a, i + k, kInBlock * k, b);
      to[k] = BlockAt(d, a, i + k);
      if (!d.given_grid) continue;
      const std::int64_t row = (i + k) / d.row_blocks(),
                         first = (i + k) % d.row_blocks() * kInBlock;
      const float* scales = a.scales.as<float>() + row * a.scales.row_stride() + first;
      const float* biases = a.biases.as<float>() + row * a.biases.row_stride() + first;
      for (int g = 0; g < kInBlock; ++g) {
        const blocks::Grid grid = blocks::given_grid(scales[g], biases[g], rule.high);
        ideal.s[kInBlock * k + g] = grid.s;
        ideal.m[kInBlock * k + g] = grid.m;
      }
    }
    QuantizeSupers<kWeighted>(d.type, b, ideal, d.given_grid, to, count);
  }
}

template <bool kWeighted>
void QuantizeSuperBlocks(const Op::Desc& d, const Op::Args& a, std::int64_t begin,
                         std::int64_t end) {
  const SuperRule rule = blocks::super_rule(d.type);
  if (rule.low < 0) return QuantizeAllSigned<kWeighted>(d, a, begin, end);
  if (rule.group == 16) return QuantizeAll<kWeighted, 16>(d, a, begin, end);
  QuantizeAll<kWeighted, 32>(d, a, begin, end);
}

void RunSuperBlocks(const Op::Desc& d, const Op::Args& a, std::int64_t begin, std::int64_t end) {
  if (a.importance) {
    QuantizeSuperBlocks<true>(d, a, begin, end);
  } else {
    QuantizeSuperBlocks<false>(d, a, begin, end);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD

#if HWY_ONCE
namespace bittern {
namespace {
BITTERN_EXPORT(RunSuperBlocks);
}

void run_super_blocks(const GgufQuantize::Desc& d, const GgufQuantize::Args& a) {
  // A super-block is a search, worth a thread long before its bytes are.
  cpu::parallel(d.outer_size * d.row_blocks(), 4, [&](std::int64_t begin, std::int64_t end) {
    BITTERN_CALL(RunSuperBlocks)(d, a, begin, end);
  });
}

}  // namespace bittern
#endif  // HWY_ONCE
