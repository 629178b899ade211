// Batches of 16 groups, a group per lane: what the blocks of 256 weights share, with a minimum or
// without. So a sum over a group is a loop over its weights in their order, as in ref, whatever the
// width of a vector. 16 groups are two super-blocks of Q4_K and Q5_K, or one of the other types.
#if defined(BITTERN_OPS_GGUF_QUANTIZE_SUPER_GROUPS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_OPS_GGUF_QUANTIZE_SUPER_GROUPS_INL_H_
#undef BITTERN_OPS_GGUF_QUANTIZE_SUPER_GROUPS_INL_H_
#else
#define BITTERN_OPS_GGUF_QUANTIZE_SUPER_GROUPS_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <type_traits>

#include "ops/gguf/gguf_quantize/block_rules.h"
#include "ops/gguf/gguf_quantize/weights-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

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

// products[g] = steps[g] * multiples[g]
HWY_INLINE void Multiply(const float* steps, const float* multiples, float* products) {
  for (int g = 0; g < kGroups; g += kWidth)
    hn::Store(hn::Mul(At(steps + g), At(multiples + g)), kF, products + g);
}

HWY_INLINE float Total(const float* errors, int count) {
  return std::accumulate(errors, errors + count, 0.0f);
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

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD
#endif
