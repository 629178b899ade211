// Where the gated delta rule's chunks lie, and its scalar rules. Tokens are counted over the whole
// tensor, batch rows one after the other.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "bittern/gdn_desc.h"
#include "core/math.h"
#include "core/sequences.h"

namespace bittern {

struct GdnChunk {
  std::int64_t begin = 0;  // its first token
  std::int64_t rows = 0;   // its tokens: `chunk`, or fewer for the last of a sequence
  std::int64_t state = 0;  // its place in h
};

// Chunk i of a sequence.
inline GdnChunk gdn_chunk(const GdnDesc& d, const Sequence& s, std::int64_t i) {
  const std::int64_t begin = s.begin + i * d.chunk;
  return {begin, std::min<std::int64_t>(d.chunk, s.end - begin), s.first_chunk + i};
}

// Elements from the first of x [batch, tokens, heads, ..] to those of a token and head.
template <class View>
std::int64_t gdn_at(const View& x, std::int64_t token, std::int64_t head) {
  return x.at(token / x.shape[1], token % x.shape[1], head);
}

// The same to key i and value j of a sequence's state.
template <class View>
std::int64_t gdn_state_at(const GdnDesc& d, const View& x, std::int64_t sequence, std::int64_t head,
                          std::int64_t i, std::int64_t j) {
  const bool key_first = d.state_layout == StateLayout::key_value;
  return x.at(sequence, head, key_first ? i : j, key_first ? j : i);
}

// Every chunk of every sequence.
inline std::vector<GdnChunk> gdn_chunks(const GdnDesc& d, const ConstView& cu_seqlens) {
  std::vector<GdnChunk> all;
  for (const Sequence& s : sequences_of(d.rows(), cu_seqlens)) {
    for (std::int64_t i = 0; i < d.chunks(s.end - s.begin); ++i) all.push_back(gdn_chunk(d, s, i));
  }
  return all;
}

// The log decay that the gate makes of a, and the strength that `beta` stands for.
BITTERN_HOST_DEVICE inline float gdn_log_decay(float a, float a_log, float dt_bias) {
  const float rate = -math::exp(a_log);
  return rate * math::softplus(a + dt_bias);
}
BITTERN_HOST_DEVICE inline float gdn_softplus_slope(float x) {
  return x > math::kSoftplusLinear ? 1.0f : math::sigmoid(x);
}
BITTERN_HOST_DEVICE inline float gdn_strength(const GdnDesc& d, float beta) {
  if (d.beta_sigmoid) beta = math::sigmoid(beta);
  return d.allow_neg_eigval ? 2 * beta : beta;
}

// e^(sum_i - sum_j) for j <= i: never above 1 while no log decay is. Where j > i it would overflow.
BITTERN_HOST_DEVICE inline float gdn_decay(float sum_i, float sum_j) {
  return math::exp(sum_i - sum_j);
}

// ---- the chunk form's bounds: see bittern/ops/gdn_chunk_forward.h ----

inline constexpr double kGdnPairsBound = 0x1p-7 + 0x1p-12;    // y by substitution
inline constexpr double kGdnInverseBound = 0x1p-7 + 0x1p-11;  // y by an inverse, which is rounded

// ---- the chunk form's sums of log decays ----

// A log decay at or below it is a reset: e^ of any sum with it is 0, unless the other log decays of
// the chunk come to thousands above 0.
inline constexpr float kGdnReset = -0x1p13f;

// A sum of log decays in two parts: the nearest multiple of 1/16, and the rest. Multiples up to
// 2^19, which 64 resets come to, have exact differences in f32.
struct GdnSum {
  float high = 0, low = 0;
};
BITTERN_HOST_DEVICE inline GdnSum gdn_sum(double sum) {
  constexpr double kRounder = 0x1.8p48;  // its ulp is 1/16
  const double high = (sum + kRounder) - kRounder;
  return {static_cast<float>(high), static_cast<float>(sum - high)};
}
// The sum that follows `sum`. A NaN fails the comparison and stays.
BITTERN_HOST_DEVICE inline double gdn_next_sum(double sum, float g) {
  return sum + static_cast<double>(g < kGdnReset ? kGdnReset : g);
}
BITTERN_HOST_DEVICE inline float gdn_decay(GdnSum i, GdnSum j = {}) {
  return math::exp(i.high - j.high, i.low - j.low);
}

}  // namespace bittern
