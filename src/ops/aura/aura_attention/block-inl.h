// Many query rows over one split: the split's rows of K and V are converted to f32 once, and 16
// query rows at a time lie in the lanes. So a row's logits, its maximum and its weights are made
// without shuffles, and the sums over V are a matrix product. The order of operations is that of
// the other passes, and so are the bits.
#if defined(BITTERN_OPS_AURA_ATTENTION_BLOCK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_OPS_AURA_ATTENTION_BLOCK_INL_H_
#undef BITTERN_OPS_AURA_ATTENTION_BLOCK_INL_H_
#else
#define BITTERN_OPS_AURA_ATTENTION_BLOCK_INL_H_
#endif

#include <limits>

#include "core/math.h"
#include "cpu/math-inl.h"
#include "cpu/matmul-inl.h"
#include "ops/aura/aura_attention/rows-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

HWY_INLINE VF SoftCap(DF d, VF cap, VF x) { return hn::Mul(cap, Tanh(d, hn::Div(x, cap))); }

// Exp for x <= 0 or NaN.
HWY_INLINE VF ExpOfNegative(DF d, VF x) {
#if HWY_TARGET <= HWY_AVX3
  // vscalefps rounds once, as the product with the second power of two does.
  const auto set = [d](float c) HWY_ATTR { return hn::Set(d, c); };
  x = VF{_mm512_max_ps(set(math::kExpLeast).raw, x.raw)};  // the second one if either is NaN
  const VF rounder = set(math::kRounder);
  const VF n = hn::Sub(hn::MulAdd(x, set(math::kLog2E), rounder), rounder);
  VF r = hn::MulAdd(n, set(-math::kLn2High), x);
  r = hn::MulAdd(n, set(-math::kLn2Low), r);
  VF q = hn::MulAdd(set(math::exp_term(4)), r, set(math::exp_term(3)));
  q = hn::MulAdd(q, r, set(math::exp_term(2)));
  q = hn::MulAdd(q, r, set(math::exp_term(1)));
  q = hn::MulAdd(q, r, set(math::exp_term(0)));
  const VF one = set(1.0f);
  const VF line = hn::Add(one, r);
  const VF tail = hn::MulAdd(hn::Mul(r, r), q, hn::Sub(r, hn::Sub(line, one)));
  return VF{_mm512_scalef_ps(hn::Add(line, tail).raw, n.raw)};
#else
  return Exp(d, x);
#endif
}

constexpr std::int64_t kScoreTokens = 4;  // that are multiplied together

// out[t] = R(first, step) of the halving tree over the 16 accumulators of row t of k and of the
// queries in the lanes of q; accumulators from kLanes on are zeros. kUnits: units of a row, or 0:
// `units`.
template <int kStep, int kLanes, int kUnits>
HWY_INLINE void ScoreTree(const float* HWY_RESTRICT q, const float* const* HWY_RESTRICT k,
                          std::int64_t units, int first, VF* HWY_RESTRICT out) {
  const DF d;
  if constexpr (kStep == kLanes) {
    const VF start = hn::LoadU(d, q + first * kUnit);
    for (int t = 0; t < kScoreTokens; ++t) out[t] = hn::Mul(start, hn::Set(d, k[t][first]));
    const auto add = [&](std::int64_t unit) HWY_ATTR {
      const VF a = hn::LoadU(d, q + (unit * kUnit + first) * kUnit);
      for (int t = 0; t < kScoreTokens; ++t)
        out[t] = hn::MulAdd(a, hn::Set(d, k[t][unit * kUnit + first]), out[t]);
    };
    if constexpr (kUnits > 0) {
      for (int unit = 1; unit < kUnits; ++unit) add(unit);
    } else {
      for (std::int64_t unit = 1; unit < units; ++unit) add(unit);
    }
  } else {
    VF other[kScoreTokens];
    ScoreTree<2 * kStep, kLanes, kUnits>(q, k, units, first, out);
    ScoreTree<2 * kStep, kLanes, kUnits>(q, k, units, first + kStep, other);
    for (int t = 0; t < kScoreTokens; ++t) out[t] = hn::Add(out[t], other[t]);
  }
}

// x[n][lane] = the dot of row n of k and of the query in the lane; `most` are the largest that are
// not NaN.
template <int kLanes, int kUnits>
HWY_NOINLINE void ScoreRows(const float* q, const float* k, std::int64_t stride, std::int64_t units,
                            std::int64_t count, float* HWY_RESTRICT x, float* HWY_RESTRICT most) {
  const DF d;
  VF largest[kHalves];
  for (std::int64_t half = 0; half < kHalves; ++half)
    largest[half] = hn::Set(d, -std::numeric_limits<float>::infinity());
  for (std::int64_t n = 0; n < count; n += kScoreTokens) {
    const float* rows[kScoreTokens];
    for (int t = 0; t < kScoreTokens; ++t) {
      rows[t] = k + (n + t) * stride;
      asm("" : "+r"(rows[t]));  // a base register each, or else every address has one
    }
    for (std::int64_t half = 0; half < kHalves; ++half) {
      VF dot[kScoreTokens];
      ScoreTree<1, kLanes, kUnits>(q + half * kWidth, rows, units, 0, dot);
      for (int t = 0; t < kScoreTokens; ++t) {
        hn::Store(dot[t], d, x + (n + t) * kUnit + half * kWidth);
        largest[half] = hn::Max(dot[t], largest[half]);  // the second one if either is NaN
      }
    }
  }
  for (std::int64_t half = 0; half < kHalves; ++half)
    hn::Store(largest[half], d, most + half * kWidth);
}
inline void Score(const float* q, const float* k, std::int64_t stride, std::int64_t units,
                  std::int64_t lanes, std::int64_t count, float* x, float* most) {
  if (lanes <= kUnit / 2) return ScoreRows<kUnit / 2, 0>(q, k, stride, units, count, x, most);
  if (units == 4) return ScoreRows<kUnit, 4>(q, k, stride, units, count, x, most);
  if (units == 8) return ScoreRows<kUnit, 8>(q, k, stride, units, count, x, most);
  ScoreRows<kUnit, 0>(q, k, stride, units, count, x, most);
}

// Up to 16 query rows over one split, whose rows of K and V are tiles of f32. Lanes beyond them
// hold what nobody reads.
struct BlockOfRows {
  std::int64_t count;
  std::int64_t begin[kUnit], end[kUnit];  // the tokens that each of them sees
  const float* q;                         // [length][16]: the queries, transposed
  float* o;                               // where the sums go, a row every `stride`
  std::int64_t stride;
  HWY_ALIGN float b[kUnit], m[kUnit], l[kUnit];
};

struct Tiles {
  const float *k, *v;                // [256][length]
  const float *k_scales, *v_scales;  // of coded tokens, or null
  std::int64_t length, lanes;        // of a row; accumulators that are not zeros
  float softcap;
};

// Weights, m, l and sums. x has room for 256 tokens of 16 rows.
inline void AttendBlock(const Tiles& tiles, BlockOfRows& block, float* HWY_RESTRICT x) {
  const DF d;
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  // [low, high) is seen by some row, [all, none) by all.
  std::int64_t low = kSplit, high = 0, all = 0, none = kSplit;
  for (std::int64_t r = 0; r < block.count; ++r) {
    if (block.begin[r] >= block.end[r]) {
      all = kSplit;
      continue;
    }
    low = std::min(low, block.begin[r]);
    high = std::max(high, block.end[r]);
    all = std::max(all, block.begin[r]);
    none = std::min(none, block.end[r]);
  }
  if (low >= high) return;
  const std::int64_t from = low / kScoreTokens * kScoreTokens;
  const std::int64_t length = tiles.length;
  Score(block.q, tiles.k + from * length, length, length / kUnit, tiles.lanes,
        round_up(high - from, kScoreTokens), x + from * kUnit, block.m);

  HWY_ALIGN float begins[kUnit], ends[kUnit];
  for (std::int64_t r = 0; r < kUnit; ++r) {
    begins[r] = static_cast<float>(block.begin[r]);
    ends[r] = static_cast<float>(block.end[r]);
  }
  const bool bent = tiles.k_scales != nullptr || tiles.softcap != 0;
  for (std::int64_t half = 0; half < kHalves; ++half) {
    float* at = x + half * kWidth;
    const VF begin = hn::Load(d, begins + half * kWidth), end = hn::Load(d, ends + half * kWidth);
    const VF bias = hn::Load(d, block.b + half * kWidth), cap = hn::Set(d, tiles.softcap);
    const VF nothing = hn::Set(d, kNone);
    // Where every token that was scored is seen by all, and as it is, the maximum is known.
    VF most = hn::Load(d, block.m + half * kWidth);
    if (bent || all > from || none < from + round_up(high - from, kScoreTokens)) {
      most = nothing;
      for (std::int64_t t = low; t < high; ++t) {
        VF v = hn::Load(d, at + t * kUnit);
        if (tiles.k_scales != nullptr) v = hn::MulAdd(v, hn::Set(d, tiles.k_scales[t]), bias);
        if (tiles.softcap != 0) v = SoftCap(d, cap, v);
        if (t < all || t >= none) {
          const VF token = hn::Set(d, static_cast<float>(t));
          v = hn::IfThenElse(hn::And(hn::Ge(token, begin), hn::Lt(token, end)), v, nothing);
        }
        hn::Store(v, d, at + t * kUnit);
        most = hn::Max(v, most);
      }
    }
    hn::Store(most, d, block.m + half * kWidth);
    const VF base = hn::IfThenZeroElse(hn::Eq(most, nothing), most);
    // Accumulator i has the tokens low + i, low + i + 16, ... The one that the contract numbers 0
    // begins at a row's own first token.
    HWY_ALIGN float acc[kUnit][kUnit] = {};
    for (std::int64_t first = low; first < high; first += kUnit) {
      for (std::int64_t t = first; t < std::min(first + kUnit, high); ++t) {
        const VF p = ExpOfNegative(d, hn::Sub(hn::Load(d, at + t * kUnit), base));
        hn::Store(hn::Add(hn::Load(d, acc[t - first]), p), d, acc[t - first]);
        hn::Store(tiles.v_scales == nullptr ? p : hn::Mul(p, hn::Set(d, tiles.v_scales[t])), d,
                  at + t * kUnit);
      }
    }
    for (std::int64_t lane = 0; lane < kWidth && half * kWidth + lane < block.count; ++lane) {
      const std::int64_t r = half * kWidth + lane, shift = block.begin[r] - low;
      if (shift <= 0) continue;
      float own[kUnit];
      for (std::int64_t i = 0; i < kUnit; ++i) own[i] = acc[(i + shift) % kUnit][lane];
      for (std::int64_t i = 0; i < kUnit; ++i) acc[i][lane] = own[i];
    }
    VF sum[kUnit];
    for (std::int64_t i = 0; i < kUnit; ++i) sum[i] = hn::Load(d, acc[i]);
    for (std::int64_t step = kUnit / 2; step > 0; step /= 2)
      for (std::int64_t i = 0; i < step; ++i) sum[i] = hn::Add(sum[i], sum[i + step]);
    hn::Store(sum[0], d, block.l + half * kWidth);
  }

  const auto add = [&](std::int64_t row, std::int64_t rows, std::int64_t begin, std::int64_t end,
                       bool more) {
    matmul::Multiply(rows, length, end - begin, {x + begin * kUnit + row, 1, kUnit},
                     tiles.v + begin * length, length, block.o + row * block.stride, block.stride,
                     more);
  };
  if (all >= none) {
    for (std::int64_t r = 0; r < block.count; ++r)
      if (block.begin[r] < block.end[r]) add(r, 1, block.begin[r], block.end[r], false);
    return;
  }
  if (low < all) {
    for (std::int64_t r = 0; r < block.count; ++r) add(r, 1, block.begin[r], all, false);
  }
  add(0, block.count, all, none, low < all);
  for (std::int64_t r = 0; r < block.count; ++r)
    if (none < block.end[r]) add(r, 1, none, block.end[r], true);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD
#endif
