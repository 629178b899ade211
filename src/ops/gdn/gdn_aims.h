#pragma once
#include "oracle/aim.h"

namespace bittern::oracle {

// Sizes with every kind of tail, ragged chunks, packed and empty sequences, three value heads a key
// head; the fields an op reads take turns.
std::vector<GdnDesc> gdn_cases(const GdnFields& fields);

// What to measure of an op that has no other choices: f32 and bf16.
std::vector<BenchCase<GdnDesc>> gdn_bench_cases();

// Those of the chunk form on a GPU, whose bars docs/results.md has.
std::vector<BenchCase<GdnDesc>> gdn_gpu_bench_cases(decltype(BenchCase<GdnDesc>::fill) fill,
                                                    const char* left_out = "mask");
// Both, for an op of FLA's chain.
std::vector<BenchCase<GdnDesc>> gdn_chain_bench_cases(const char* left_out = "");

// Log decays: mostly -2..0, often 0, now and then far below.
void aim_log_decay(const ConstView& g, Rng& rng);

// Such log decays summed from the start of each chunk, as gdn_cumsum leaves them. Without
// `cu_seqlens` each batch row is a sequence.
void aim_summed_log_decay(const GdnDesc& d, const ConstView& g, const ConstView& cu_seqlens,
                          Rng& rng);

// What tensor cores take: keys of 64 or 128, values in groups of 64, chunks of 64. Where g is given
// as sums, they must then be sums, or most decays are infinite and nothing is promised.
inline bool for_tensor_cores(const GdnDesc& d) {
  return (d.key_dim == 64 || d.key_dim == 128) && d.value_dim % 64 == 0 && d.chunk == 64;
}
struct GdnSizes {
  std::int64_t keys, values;
};
std::vector<GdnSizes> gdn_tensor_core_sizes();  // values up to 256
std::vector<GdnDesc> gdn_tensor_core_cases();

// Strengths in 0..2, both ends often.
void aim_beta(const ConstView& beta, Rng& rng);

// Different states of the pool in a mixed order, -1 where there are too few of them.
void aim_state_index(const GdnStepDesc& d, const ConstView& index, Rng& rng);

// The inputs of the rule over whole sequences, gradients aside.
template <class Args>
void aim_rule(const GdnDesc& d, const Args& a, Rng& rng) {
  aim_sequences(d.rows(), a.cu_seqlens, rng);
  const double size = d.qk_l2norm ? 1 : 1 / std::sqrt(static_cast<double>(d.key_dim));
  aim_values(a.q, size, rng);
  aim_values(a.k, size, rng);
  aim_values(a.v, 1, rng);
  aim_values(a.initial_state, 1, rng);
  if (d.gate) {
    aim_values(a.g, 8, rng);
    aim_values(a.a_log, 1, rng);
    aim_values(a.dt_bias, 1, rng);
  } else {
    aim_log_decay(a.g, rng);
  }
  if (rng.chance(2)) {  // resets, and what is all but one
    static constexpr double kStrong[] = {HUGE_VAL, 3.4e38, 1e30, 1e6, 8192, 8191};
    for (std::int64_t i = 0; i < a.g.shape.numel(); ++i)
      if (rng.chance(8)) put(a.g, i, (d.gate ? 1 : -1) * kStrong[rng.below(std::size(kStrong))]);
  }
  if (d.beta_sigmoid) {
    aim_values(a.beta, 3, rng);
  } else {
    aim_beta(a.beta, rng);
  }
  aim_mask(a.mask, rng);
}

}  // namespace bittern::oracle
