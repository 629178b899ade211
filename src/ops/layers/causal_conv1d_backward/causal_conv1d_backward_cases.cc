#include "ops/layers/layers_aims.h"

namespace bittern::oracle {

// Two of three: with ten optional operands each is run in many layouts.
std::vector<CausalConvDesc> causal_conv1d_backward_check_cases() {
  std::vector<CausalConvDesc> cases = causal_conv_cases(), some;
  for (std::size_t i = 0; i < cases.size(); ++i)
    if (i % 3 != 1) some.push_back(cases[i]);
  return some;
}

std::vector<BenchCase<CausalConvDesc>> causal_conv1d_backward_bench_cases() {
  const CausalConvDesc bf16{.tokens = 4096, .channels = 8192, .element = DType::bf16};
  CausalConvDesc f32 = bf16, large = bf16;
  f32.element = DType::f32;
  large.tokens = 32768;
  const char* plain = "bias initial_state d_final_state mask cu_seqlens d_bias d_initial_state";
  return {{"bf16 4096 x 8192", bf16, nullptr, plain},
          {"f32 4096 x 8192", f32, nullptr, plain},
          {.label = "bf16 32768 x 8192", .desc = large, .left_out = plain, .gpu_only = true}};
}

// One NaN would hide every other fault of a sum, so all but a few problems are finite.
void causal_conv1d_backward_aim(const CausalConvDesc& d, const CausalConv1dBackward::Args& a,
                                Rng& rng) {
  aim_sequences(d.rows(), a.cu_seqlens, rng);
  aim_mask(a.mask, rng);
  aim_gradient(a.d_y, rng);
  if (rng.chance(6)) return;
  for (const ConstView& v : {a.x, a.weight, a.bias, a.initial_state, a.d_final_state}) {
    for (std::int64_t i = 0; v && i < v.shape.numel(); ++i)
      if (!(std::fabs(get(v, i)) < 1e6)) put(v, i, rng.normal());
  }
}

}  // namespace bittern::oracle
