// Blocks of 32 are quantised one at a time, in vectors along the row.
#include <algorithm>
#include <limits>
#include <numeric>

#include "bittern/ops/gguf_quantize.h"
#include "cpu/dispatch.h"
#include "cpu/parallel.h"
#include "ops/gguf_quantize/block_rules.h"
#include "plan/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/gguf_quantize/gguf_quantize_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "cpu/stream-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = GgufQuantize;

constexpr hn::CappedTag<float, 16> kF;
constexpr hn::Rebind<std::int32_t, decltype(kF)> kI;
using Floats = hn::Vec<decltype(kF)>;
constexpr int kWidth = static_cast<int>(hn::MaxLanes(kF));

constexpr hn::FixedTag<std::uint8_t, 32> kBytes;
constexpr hn::FixedTag<std::uint8_t, 16> kHalfBytes;

HWY_INLINE void PutHalf(std::uint8_t* at, float x) {
  const hn::CappedTag<float, 4> d;
  const hn::Rebind<hwy::float16_t, decltype(d)> dh;
  alignas(8) hwy::float16_t half[4];
  hn::Store(hn::DemoteTo(dh, hn::Set(d, x)), dh, half);
  std::memcpy(at, half, sizeof half[0]);
}

// Weights as the rules see them.
template <class X>
HWY_INLINE Floats LoadWeights(const X* w, Floats most) {
  const auto v = LoadMath(kF, w);
  return hn::Max(hn::Min(hn::IfThenElseZero(hn::Eq(v, v), v), most), hn::Neg(most));
}

HWY_INLINE float Inverse(float d) {
  const float r = d == 0 ? 0 : 1 / d;
  return std::isinf(r) ? 0 : r;
}

// 32 weights.
constexpr int kParts = 32 / kWidth;
using Group = Floats[kParts];

// Codes of weights 16 i .. 16 i + 15: z truncated.
template <int kLanes = kWidth>
HWY_INLINE hn::Vec<decltype(kHalfBytes)> CodesOf(const Group& z, int i) {
  const auto bytes = [&](int part) HWY_ATTR {
    const hn::Rebind<std::int8_t, decltype(kF)> d8;
    const hn::Rebind<std::uint8_t, decltype(kF)> du8;
    return hn::BitCast(du8, hn::DemoteTo(d8, hn::ConvertTo(kI, z[part])));
  };
  if constexpr (kLanes == 16) {
    return bytes(i);
  } else {
    return hn::Combine(kHalfBytes, bytes(2 * i + 1), bytes(2 * i));
  }
}

// The low halves of two weights in a byte; before them, where there are, the fifth bits.
template <bool kFive>
HWY_INLINE void PackCodes(const Group& z, std::uint8_t* to) {
  const auto low = CodesOf(z, 0), high = CodesOf(z, 1);
  if constexpr (kFive) {
    const auto sixteen = hn::Set(kBytes, std::uint8_t{16});
    const auto bit = hn::And(hn::Combine(kBytes, high, low), sixteen);
    std::uint8_t bits[8];
    hn::StoreMaskBits(kBytes, hn::Eq(bit, sixteen), bits);
    std::memcpy(to, bits, 4);
    to += 4;
  }
  const auto fifteen = hn::Set(kHalfBytes, std::uint8_t{15});
  hn::StoreU(hn::Or(hn::And(low, fifteen), hn::ShiftLeft<4>(high)), kHalfBytes, to);
}

template <BlockType kType, class X>
HWY_INLINE void QuantizeSmall(const X* w, std::uint8_t* block) {
  constexpr bool kFive = kType == BlockType::q5_0 || kType == BlockType::q5_1;
  const auto most = hn::Set(kF, blocks::limit(kType));
  Group x, z;
  for (int i = 0; i < kParts; ++i) x[i] = LoadWeights(w + i * kWidth, most);
  auto low = x[0], high = x[0];
  for (int i = 1; i < kParts; ++i) {
    low = hn::Min(low, x[i]);
    high = hn::Max(high, x[i]);
  }
  const float min = hn::GetLane(hn::MinOfLanes(kF, low));
  const float max = hn::GetLane(hn::MaxOfLanes(kF, high));
  if constexpr (kType == BlockType::q8_0) {
    const float d = (std::max(max, -min) + 0.0f) / 127;
    const auto r = hn::Set(kF, Inverse(d));
    PutHalf(block, d);
    // Truncated, this is half away from 0: the sum reaches the next integer just when the fraction
    // is at least 1/2.
    const auto up = hn::Set(kF, 0x1.fffffep-2f);
    for (int i = 0; i < kParts; ++i) {
      z[i] = hn::Mul(x[i], r);
      z[i] = hn::Add(z[i], hn::CopySign(up, z[i]));
    }
    hn::StoreU(CodesOf(z, 0), kHalfBytes, block + 2);
    hn::StoreU(CodesOf(z, 1), kHalfBytes, block + 18);
  } else if constexpr (kType == BlockType::q4_1 || kType == BlockType::q5_1) {
    constexpr int n = kFive ? 31 : 15;
    const float m = min + 0.0f, d = (max - m + 0.0f) / n;
    const auto r = hn::Set(kF, Inverse(d));
    PutHalf(block, d);
    PutHalf(block + 2, m);
    for (int i = 0; i < kParts; ++i) {
      z[i] = hn::Mul(hn::Sub(x[i], hn::Set(kF, m)), r);
      z[i] = hn::Min(hn::Add(z[i], hn::Set(kF, 0.5f)), hn::Set(kF, n));
    }
    PackCodes<kFive>(z, block + 4);
  } else {
    constexpr int n = kFive ? 16 : 8;
    float e = max > -min ? max : min;
    if (max == -min) {
      // Both signs of it: the first one counts.
      alignas(64) float weights[32];
      for (int i = 0; i < kParts; ++i) hn::Store(x[i], kF, weights + i * kWidth);
      e = *std::find_if(weights, weights + 32, [&](float v) { return std::abs(v) == max; });
    }
    const float d = e / -n;
    const auto r = hn::Set(kF, Inverse(d));
    PutHalf(block, d);
    for (int i = 0; i < kParts; ++i) {
      z[i] = hn::Add(hn::Mul(x[i], r), hn::Set(kF, n + 0.5f));
      z[i] = hn::Min(z[i], hn::Set(kF, 2 * n - 1));
    }
    PackCodes<kFive>(z, block + 2);
  }
}

// Blocks [begin, end), counted through all rows.
template <BlockType kType, class X>
void QuantizeSmallBlocks(const Op::Desc& d, const Op::Args& a, std::int64_t begin,
                         std::int64_t end) {
  const std::int64_t per_row = d.row_blocks();
  for (std::int64_t i = begin; i < end;) {
    const std::int64_t row = i / per_row, first = i % per_row;
    const std::int64_t count = std::min(per_row - first, end - i);
    const X* w = a.w.as<X>() + row * a.w.row_stride() + first * 32;
    std::uint8_t* block =
        a.blocks.as<std::uint8_t>() + row * a.blocks.row_stride() + first * block_size(kType).bytes;
    for (std::int64_t k = 0; k < count; ++k, w += 32, block += block_size(kType).bytes) {
      PrefetchNext(w, 32);
      QuantizeSmall<kType>(w, block);
    }
    i += count;
  }
}

// ---- Q4_K, Q5_K, Q6_K: 16 groups at a time, a group per lane ----
//
// So a sum over a group is a loop over its weights in their order, as in ref, whatever the width
// of a vector. 16 groups are two super-blocks of Q4_K and Q5_K, or one of Q6_K.

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

template <bool kWeighted>
void Search(const Batch<32>& b, int last, Ideals& best) {
  const auto n = hn::Set(kF, static_cast<float>(last));
  const auto zero = hn::Zero(kF);
  for (int g = 0; g < kGroups; g += kWidth) {
    auto low = zero, high = At(b.x[0] + g);
    for (int j = 0; j < 32; ++j) {
      low = hn::Min(low, At(b.x[j] + g));
      high = hn::Max(high, At(b.x[j] + g));
    }
    const auto range = hn::Sub(high, low), one = At(b.one + g);
    auto u1 = zero, u2 = zero, x2 = zero;
    alignas(64) float us[32][kWidth];
    for (int j = 0; j < 32; ++j) {
      const auto x = At(b.x[j] + g), u = hn::Sub(x, low), cu = Weigh<kWeighted>(b, j, g, u);
      hn::Store(u, kF, us[j]);
      u1 = hn::Add(u1, cu);
      u2 = hn::Add(u2, hn::Mul(cu, u));
      x2 = hn::Add(x2, hn::Mul(Weigh<kWeighted>(b, j, g, x), x));
    }
    auto s_best = hn::Div(range, n), m_best = hn::Neg(low), q_best = zero, qq_best = zero;
    auto least = hn::Set(kF, std::numeric_limits<float>::infinity());
    const auto some = hn::Ge(range, hn::Set(kF, blocks::kTiny));
    for (int k = 0; k < blocks::kStarts; ++k) {
      const auto steps = hn::Set(kF, blocks::steps_of_start(last, k));
      const auto r = hn::IfThenElseZero(some, hn::Div(steps, range));
      auto q1 = zero, q2 = zero, qu = zero;
      for (int j = 0; j < 32; ++j) {
        const auto u = At(us[j]);
        const auto q = hn::Min(hn::Round(hn::Mul(u, r)), n), t = Weigh<kWeighted>(b, j, g, q);
        q1 = hn::Add(q1, t);
        q2 = hn::Add(q2, hn::Mul(t, q));
        qu = hn::Add(qu, hn::Mul(t, u));
      }
      const auto square = hn::Mul(one, q2), det = hn::Sub(square, hn::Mul(q1, q1));
      const auto line = hn::Gt(det, hn::Mul(hn::Set(kF, blocks::kDegenerate), square));
      auto s = hn::Div(hn::Sub(hn::Mul(one, qu), hn::Mul(q1, u1)), det);
      const auto bias = hn::Div(hn::Sub(hn::Mul(q2, u1), hn::Mul(q1, qu)), det);
      auto m = hn::Neg(hn::Add(low, bias));
      auto error = hn::Sub(u2, hn::Add(hn::Mul(s, qu), hn::Mul(bias, u1)));
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
    }
    const auto most = hn::Set(kF, blocks::limit(BlockType::q4_k));
    hn::Store(hn::Min(s_best, most), kF, best.s + g);
    hn::Store(hn::Min(m_best, most), kF, best.m + g);
    hn::Store(q_best, kF, best.q + g);
    hn::Store(qq_best, kF, best.qq + g);
  }
}

// Codes of groups on the grid s, m; r = 1 / s.
HWY_INLINE Floats Code(Floats x, Floats m, Floats r, float last) {
  return RoundedTo(hn::Mul(hn::Add(x, m), r), 0, last);
}

template <bool kWeighted>
void SumCodes(const Batch<32>& b, int last, const float* s, const float* m, CodeSums& sums) {
  const auto n = static_cast<float>(last);
  for (int g = 0; g < kGroups; g += kWidth) {
    const auto r = InverseOrZero(At(s + g)), min = At(m + g);
    auto q1 = hn::Zero(kF), q2 = q1, qx = q1;
    for (int j = 0; j < 32; ++j) {
      const auto x = At(b.x[j] + g), q = Code(x, min, r, n), t = Weigh<kWeighted>(b, j, g, q);
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
template <bool kSigned>
HWY_INLINE float BestStep(const float* values, const float* weights, float largest) {
  constexpr blocks::StepRule rule = kSigned ? blocks::kSignedSteps : blocks::kUnsignedSteps;
  static_assert(blocks::kStepTries % kWidth == 0);
  alignas(64) float steps[blocks::kStepTries], errors[blocks::kStepTries];
  const auto half = hn::Set(kF, blocks::kLargestHalf);
  for (int k = 0; k < blocks::kStepTries; k += kWidth) {
    const auto parts = hn::Add(hn::Set(kF, rule.top), hn::Mul(hn::Set(kF, rule.toward),
                                                              hn::Iota(kF, static_cast<float>(k))));
    const auto step = RoundMath<f16>(
        kF, hn::Min(hn::Max(hn::Div(hn::Set(kF, largest), parts), hn::Neg(half)), half));
    const auto r = InverseOrZero(step);
    auto error = hn::Zero(kF);
    for (int g = 0; g < rule.groups; ++g) {
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

// The 8 groups of a super-block all have its d.
HWY_INLINE void Spread(float value, float* to) { std::fill(to, to + 8, value); }

void Fit(const Batch<32>& b, const Ideals& ideal, Scales& f) {
  constexpr blocks::StepRule rule = blocks::kUnsignedSteps;
  alignas(64) float mean[kGroups], weight[kGroups], m[kGroups];
  const auto zero = hn::Zero(kF);
  for (int g = 0; g < kGroups; g += kWidth) {
    const auto one = At(b.one + g), q = At(ideal.q + g);
    const auto average = hn::IfThenElseZero(hn::Gt(one, zero), hn::Div(q, one));
    hn::Store(average, kF, mean + g);
    hn::Store(hn::Sub(At(ideal.qq + g), hn::Mul(q, average)), kF, weight + g);
  }
  for (int g = 0; g < kGroups; g += 8)
    Spread(
        BestStep<false>(ideal.s + g, weight + g, *std::max_element(ideal.s + g, ideal.s + g + 8)),
        f.d + g);
  const auto most = hn::Set(kF, blocks::limit(BlockType::q4_k));
  for (int g = 0; g < kGroups; g += kWidth) {
    const auto s = At(ideal.s + g), d = At(f.d + g);
    const auto sc = RoundedTo(hn::Mul(s, InverseOrZero(d)), rule.low, rule.high);
    const auto moved = hn::Mul(At(mean + g), hn::Sub(hn::Mul(d, sc), s));
    hn::Store(sc, kF, f.sc + g);
    hn::Store(hn::Min(hn::Max(hn::Add(moved, At(ideal.m + g)), zero), most), kF, m + g);
  }
  for (int g = 0; g < kGroups; g += 8)
    Spread(BestStep<false>(m + g, b.one + g, *std::max_element(m + g, m + g + 8)), f.dmin + g);
  for (int g = 0; g < kGroups; g += kWidth) {
    const auto r = InverseOrZero(At(f.dmin + g));
    hn::Store(RoundedTo(hn::Mul(At(m + g), r), rule.low, rule.high), kF, f.mn + g);
  }
}

template <bool kWeighted>
void Refine(const Batch<32>& b, int last, Scales& f) {
  constexpr blocks::StepRule rule = blocks::kUnsignedSteps;
  const auto n = static_cast<float>(last);
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
        for (int j = 0; j < 32; ++j) {
          const auto x = At(b.x[j] + g), q = Code(x, m, r, n);
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

// From the groups' ideal grids to the scales of both super-blocks.
template <bool kWeighted>
void FitScales(const Batch<32>& b, int last, const Ideals& ideal, Scales& best) {
  Fit(b, ideal, best);
  Refine<kWeighted>(b, last, best);
  Scales again = best;
  alignas(64) float s[kGroups], m[kGroups];
  Multiply(best.d, best.sc, s);
  Multiply(best.dmin, best.mn, m);
  CodeSums codes;
  SumCodes<kWeighted>(b, last, s, m, codes);
  for (int g = 0; g < kGroups; g += 8) {
    blocks::Sums sums[8];
    for (int i = 0; i < 8; ++i)
      sums[i] = {b.one[g + i], b.sum_x[g + i], codes.q[g + i], codes.qq[g + i], codes.qx[g + i]};
    float d = best.d[g], dmin = best.dmin[g];
    blocks::refit(sums, best.sc + g, best.mn + g, d, dmin);
    Spread(d, again.d + g);
    Spread(dmin, again.dmin + g);
  }
  Refine<kWeighted>(b, last, again);
  for (int g = 0; g < kGroups; g += 8)
    if (Total(again.error + g, 8) < Total(best.error + g, 8)) CopyGroups(again, g, 8, best);
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

HWY_INLINE void PackSuper(BlockType type, const std::uint8_t (*q)[32], const Scales& f, int g,
                          std::uint8_t* block) {
  blocks::put_f16(block, f.d[g]);
  blocks::put_f16(block + 2, f.dmin[g]);
  blocks::put_scales(f.sc + g, f.mn + g, block + 4);
  std::uint8_t* qs = block + (type == BlockType::q4_k ? 16 : 48);
  const auto low = hn::Set(kBytes, std::uint8_t{15}), one = hn::Set(kBytes, std::uint8_t{1});
  auto high = hn::Zero(kBytes);
  for (int i = 7; i >= 0; --i) {
    const auto bit = hn::And(hn::ShiftRight<4>(hn::LoadU(kBytes, q[g + i])), one);
    high = hn::Or(hn::Add(high, high), bit);
  }
  if (type == BlockType::q5_k) hn::StoreU(high, kBytes, block + 16);
  for (int i = 0; i < 8; i += 2) {
    const auto a = hn::LoadU(kBytes, q[g + i]), b = hn::LoadU(kBytes, q[g + i + 1]);
    hn::StoreU(hn::Or(hn::And(a, low), hn::ShiftLeft<4>(b)), kBytes, qs + 16 * i);
  }
}

template <bool kWeighted>
void QuantizeSupers(BlockType type, Batch<32>& b, Ideals& ideal, bool given,
                    std::uint8_t* const* to, int count) {
  const int last = type == BlockType::q4_k ? 15 : 31;
  SumUp<kWeighted>(b);
  if (given) {
    CodeSums codes;
    SumCodes<kWeighted>(b, last, ideal.s, ideal.m, codes);
    std::copy(codes.q, codes.q + kGroups, ideal.q);
    std::copy(codes.qq, codes.qq + kGroups, ideal.qq);
  } else {
    Search<kWeighted>(b, last, ideal);
  }
  Scales scales;
  FitScales<kWeighted>(b, last, ideal, scales);
  alignas(64) float s[kGroups], m[kGroups];
  Multiply(scales.d, scales.sc, s);
  Multiply(scales.dmin, scales.mn, m);
  alignas(64) std::uint8_t codes[kGroups][32];
  EachCode(
      [&](int j, int g) HWY_ATTR {
        return Code(At(b.x[j] + g), At(m + g), InverseOrZero(At(s + g)), static_cast<float>(last));
      },
      codes);
  for (int i = 0; i < count; ++i) PackSuper(type, codes, scales, 8 * i, to[i]);
}

// Q6_K

HWY_INLINE Floats SignedCode(Floats x, Floats r) { return RoundedTo(hn::Mul(x, r), -32, 31); }

template <bool kWeighted>
HWY_INLINE void SumSignedCodes(const Batch<16>& b, int g, Floats r, Floats& qq, Floats& qx) {
  qq = hn::Zero(kF);
  qx = qq;
  for (int j = 0; j < 16; ++j) {
    const auto x = At(b.x[j] + g), q = SignedCode(x, r), t = Weigh<kWeighted>(b, j, g, q);
    qq = hn::Add(qq, hn::Mul(t, q));
    qx = hn::Add(qx, hn::Mul(t, x));
  }
}

template <bool kWeighted>
void SearchSigned(const Batch<16>& b, Ideals& best) {
  const auto zero = hn::Zero(kF);
  for (int g = 0; g < kGroups; g += kWidth) {
    auto low = At(b.x[0] + g), high = low;
    for (int j = 1; j < 16; ++j) {
      low = hn::Min(low, At(b.x[j] + g));
      high = hn::Max(high, At(b.x[j] + g));
    }
    const auto largest = hn::IfThenElse(hn::Gt(high, hn::Neg(low)), high, low);
    const auto some = hn::Ge(hn::Abs(largest), hn::Set(kF, blocks::kTiny));
    auto s_best = zero, qq_best = zero, most = zero;
    for (int k = 0; k < blocks::kStarts; ++k) {
      const auto steps = hn::Set(kF, -blocks::signed_steps_of_start(k));
      Floats qq, qx;
      SumSignedCodes<kWeighted>(b, g, hn::IfThenElseZero(some, hn::Div(steps, largest)), qq, qx);
      const auto s = hn::Div(qx, qq), gain = hn::Mul(qx, s);
      const auto take = hn::And(hn::Gt(qq, zero), hn::Gt(gain, most));
      most = hn::IfThenElse(take, gain, most);
      s_best = hn::IfThenElse(take, s, s_best);
      qq_best = hn::IfThenElse(take, qq, qq_best);
    }
    hn::Store(s_best, kF, best.s + g);
    hn::Store(qq_best, kF, best.qq + g);
  }
}

template <bool kWeighted>
void RefineSigned(const Batch<16>& b, Scales& f) {
  constexpr blocks::StepRule rule = blocks::kSignedSteps;
  for (int g = 0; g < kGroups; g += kWidth) {
    const auto d = At(f.d + g), sc_from = At(f.sc + g);
    auto least = hn::Set(kF, std::numeric_limits<float>::infinity()), sc_best = sc_from;
    for (const float move : blocks::kMoves) {
      const auto sc = RoundedTo(hn::Add(sc_from, hn::Set(kF, move)), rule.low, rule.high);
      const auto s = hn::Mul(d, sc), r = InverseOrZero(s);
      auto error = hn::Zero(kF);
      for (int j = 0; j < 16; ++j) {
        const auto x = At(b.x[j] + g), e = hn::Sub(x, hn::Mul(s, SignedCode(x, r)));
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

HWY_INLINE void PackSigned(const std::uint8_t (&q)[kGroups][16], const Scales& f,
                           std::uint8_t* block) {
  const auto* codes = &q[0][0];
  const auto low = hn::Set(kBytes, std::uint8_t{15});
  for (int h = 0; h < 2; ++h) {
    const auto part = [&](int k) HWY_ATTR { return hn::LoadU(kBytes, codes + 128 * h + 32 * k); };
    const auto q0 = part(0), q1 = part(1), q2 = part(2), q3 = part(3);
    hn::StoreU(hn::Or(hn::And(q0, low), hn::ShiftLeft<4>(q2)), kBytes, block + 64 * h);
    hn::StoreU(hn::Or(hn::And(q1, low), hn::ShiftLeft<4>(q3)), kBytes, block + 64 * h + 32);
    const auto high = hn::Or(
        hn::Or(hn::ShiftRight<4>(q0), hn::ShiftLeft<2>(hn::ShiftRight<4>(q1))),
        hn::Or(hn::ShiftLeft<4>(hn::ShiftRight<4>(q2)), hn::ShiftLeft<6>(hn::ShiftRight<4>(q3))));
    hn::StoreU(high, kBytes, block + 128 + 32 * h);
  }
  for (int g = 0; g < kGroups; ++g)
    block[192 + g] = static_cast<std::uint8_t>(static_cast<int>(f.sc[g]));
  blocks::put_f16(block + 208, f.d[0]);
}

template <bool kWeighted>
void QuantizeSigned(const Batch<16>& b, std::uint8_t* block) {
  constexpr blocks::StepRule rule = blocks::kSignedSteps;
  Ideals ideal;
  SearchSigned<kWeighted>(b, ideal);
  float largest = 0;
  for (const float s : ideal.s)
    if (std::abs(s) > std::abs(largest)) largest = s;
  Scales best;
  const float step = BestStep<true>(ideal.s, ideal.qq, largest);
  std::fill(best.d, best.d + kGroups, step);
  for (int g = 0; g < kGroups; g += kWidth) {
    const auto z = hn::Mul(At(ideal.s + g), InverseOrZero(At(best.d + g)));
    hn::Store(RoundedTo(z, rule.low, rule.high), kF, best.sc + g);
  }
  RefineSigned<kWeighted>(b, best);
  CodeSums codes;
  for (int g = 0; g < kGroups; g += kWidth) {
    Floats qq, qx;
    const auto s = hn::Mul(At(best.d + g), At(best.sc + g));
    SumSignedCodes<kWeighted>(b, g, InverseOrZero(s), qq, qx);
    hn::Store(qq, kF, codes.qq + g);
    hn::Store(qx, kF, codes.qx + g);
  }
  blocks::Sums sums[kGroups];
  for (int g = 0; g < kGroups; ++g) sums[g] = {0, 0, 0, codes.qq[g], codes.qx[g]};
  Scales again = best;
  float d = step;
  blocks::refit_signed(sums, best.sc, d);
  std::fill(again.d, again.d + kGroups, d);
  RefineSigned<kWeighted>(b, again);
  const Scales& chosen = Total(again.error, kGroups) < Total(best.error, kGroups) ? again : best;
  alignas(64) float s[kGroups];
  Multiply(chosen.d, chosen.sc, s);
  alignas(64) std::uint8_t q[kGroups][16];
  EachCode(
      [&](int j, int g) HWY_ATTR {
        return hn::Add(SignedCode(At(b.x[j] + g), InverseOrZero(At(s + g))), hn::Set(kF, 32.0f));
      },
      q);
  PackSigned(q, chosen, block);
}

// Super-block i of all rows: its weights into groups [first, ...) of the batch.
template <int kSize>
void Gather(const Op::Desc& d, const Op::Args& a, std::int64_t i, int first, Batch<kSize>& b) {
  const std::int64_t row = i / d.row_blocks(), column = i % d.row_blocks() * 256;
  const auto most = hn::Set(kF, blocks::limit(d.type));
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

// Super-blocks [begin, end), counted through all rows.
void QuantizeSuperBlocks(const Op::Desc& d, const Op::Args& a, std::int64_t begin,
                         std::int64_t end) {
  const BlockSize size = block_size(d.type);
  const auto block_at = [&](std::int64_t i) {
    return a.blocks.as<std::uint8_t>() + i / d.row_blocks() * a.blocks.row_stride() +
           i % d.row_blocks() * size.bytes;
  };
  const bool weighted = static_cast<bool>(a.importance);
  if (d.type == BlockType::q6_k) {
    Batch<16> b;
    for (std::int64_t i = begin; i < end; ++i) {
      Gather(d, a, i, 0, b);
      if (weighted) {
        QuantizeSigned<true>(b, block_at(i));
      } else {
        QuantizeSigned<false>(b, block_at(i));
      }
    }
    return;
  }
  const int last = d.type == BlockType::q4_k ? 15 : 31;
  Batch<32> b = {};
  Ideals ideal = {};
  for (std::int64_t i = begin; i < end; i += 2) {
    const int count = static_cast<int>(std::min<std::int64_t>(end - i, 2));
    std::uint8_t* to[2] = {};
    for (int k = 0; k < count; ++k) {
      Gather(d, a, i + k, 8 * k, b);
      to[k] = block_at(i + k);
      if (!d.given_grid) continue;
      const std::int64_t row = (i + k) / d.row_blocks(), first = (i + k) % d.row_blocks() * 8;
      const float* scales = a.scales.as<float>() + row * a.scales.row_stride() + first;
      const float* biases = a.biases.as<float>() + row * a.biases.row_stride() + first;
      for (int g = 0; g < 8; ++g) {
        const blocks::Grid grid = blocks::given_grid(scales[g], biases[g], last);
        ideal.s[8 * k + g] = grid.s;
        ideal.m[8 * k + g] = grid.m;
      }
    }
    if (weighted) {
      QuantizeSupers<true>(d.type, b, ideal, d.given_grid, to, count);
    } else {
      QuantizeSupers<false>(d.type, b, ideal, d.given_grid, to, count);
    }
  }
}

void RunGgufQuantize(const Op::Desc& d, const Op::Args& a, std::int64_t begin, std::int64_t end) {
  if (block_size(d.type).weights == 256) return QuantizeSuperBlocks(d, a, begin, end);
  (void)visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    switch (d.type) {
      case BlockType::q4_0: QuantizeSmallBlocks<BlockType::q4_0, X>(d, a, begin, end); break;
      case BlockType::q4_1: QuantizeSmallBlocks<BlockType::q4_1, X>(d, a, begin, end); break;
      case BlockType::q5_0: QuantizeSmallBlocks<BlockType::q5_0, X>(d, a, begin, end); break;
      case BlockType::q5_1: QuantizeSmallBlocks<BlockType::q5_1, X>(d, a, begin, end); break;
      default: QuantizeSmallBlocks<BlockType::q8_0, X>(d, a, begin, end);
    }
    return Status();
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD

#if HWY_ONCE
namespace bittern {
namespace {

using Op = GgufQuantize;
BITTERN_EXPORT(RunGgufQuantize);

Status supports(const Op::Desc&) { return cpu::supported(); }

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  // A super-block is a search, worth a thread long before its bytes are.
  const std::int32_t weights = block_size(d.type).weights;
  cpu::parallel(d.outer_size * d.row_blocks(), weights == 256 ? 4 : cpu::kGrain / weights,
                [&](std::int64_t begin, std::int64_t end) {
                  BITTERN_CALL(RunGgufQuantize)(d, a, begin, end);
                });
  return {};
}

constexpr Kernel<Op> kKernels[] = {{.name = "cpu",
                                    .backend = "cpu",
                                    .supports = supports,
                                    .architecture = cpu::architecture,
                                    .run = run}};

}  // namespace

std::span<const Kernel<GgufQuantize>> gguf_quantize_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
