// Putting inputs where kernels go wrong; shared by the ops' <op>_cases.cc.
#pragma once
#include "oracle/oracle.h"

namespace bittern::oracle {

// Scales that are ordinary, powers of two, negative, and now and then 0, NaN, infinite or denormal.
void aim_scale(const ConstView& scale, Rng& rng);

// About half of x within 2 ulp of a rounding tie (k + 1/2) * s or of a clamp, the rest as it was.
void aim_quotient(const QuantizeDesc& d, const ConstView& x, const ConstView& scale,
                  const ConstView& zero_point, Rng& rng);

// Terms of sums: mostly finite, since one NaN would hide every other fault of a sum; sometimes all
// zeros of both signs, or all -0, where padding shows.
void aim_gradient(const ConstView& dy, Rng& rng);

// Lengths around blocks of partial sums, columns in several units, and parameters without elements.
std::vector<QuantizeDesc> long_sum_cases(const QuantizeFields& fields);

// Geometries (group, token, channel, tensor; sizes with every kind of tail) x elements x codes.
// Fields a case does not set stay as in `base`.
std::vector<QuantizeDesc> quantize_cases(const QuantizeFields& fields);

// For the elementwise ops that store no code: the same and ranges of any 32-bit kind, and what to
// measure.
std::vector<QuantizeDesc> codeless_cases(const QuantizeFields& fields);
std::vector<BenchCase<QuantizeDesc>> codeless_bench_cases();

// Each case once more at a GPU's size.
std::vector<BenchCase<QuantizeDesc>> with_large_cases(std::vector<BenchCase<QuantizeDesc>> cases);

// The same for the affine ops: groups of 2 3 5 32 48 64 80 96 128 1000 1024, bits and bins,
// storages.
std::vector<AffineDesc> affine_cases();

// ---- the gated delta rule ----

// Sizes with every kind of tail, ragged chunks, packed and empty sequences, three value heads a key
// head; the fields an op reads take turns.
std::vector<GdnDesc> gdn_cases(const GdnFields& fields);

// Sequences that cover the tokens, some of them empty.
void aim_sequences(const GdnDesc& d, const ConstView& cu_seqlens, Rng& rng);
// Mostly finite values of about the given size, since one NaN spoils its whole chunk.
void aim_values(const ConstView& x, double size, Rng& rng);
// Log decays: mostly -2..0, often 0, now and then far below.
void aim_log_decay(const ConstView& g, Rng& rng);
// Strengths in 0..2, both ends often.
void aim_beta(const ConstView& beta, Rng& rng);

// Ones with holes, where there is a mask.
void aim_mask(const ConstView& mask, Rng& rng);

// The inputs of the rule over whole sequences, gradients aside.
template <class Args>
void aim_rule(const GdnDesc& d, const Args& a, Rng& rng) {
  aim_sequences(d, a.cu_seqlens, rng);
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

// ---- the layers around it ----

// Widths, sequences and channels with every kind of tail.
std::vector<CausalConvDesc> causal_conv_cases();

// Rows and lengths with every kind of tail, and rows of zeros, tiny or huge values among them.
std::vector<GatedNormDesc> gated_norm_cases();
void aim_norm_rows(const GatedNormDesc& d, const ConstView& x, Rng& rng);

}  // namespace bittern::oracle
