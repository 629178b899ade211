#include "ops/layers/layers_aims.h"

namespace bittern::oracle {

std::vector<CausalConvDesc> causal_conv1d_check_cases() { return causal_conv_cases(); }

std::vector<BenchCase<CausalConvDesc>> causal_conv1d_bench_cases() {
  // Qwen3-Next's q, k and v; the same when decoding.
  const CausalConvDesc prefill{.tokens = 4096, .channels = 8192, .element = DType::bf16};
  const CausalConvDesc decode{.batch = 256, .tokens = 1, .channels = 8192, .element = DType::bf16};
  CausalConvDesc f32 = prefill, linear = prefill, large = prefill;
  f32.element = DType::f32;
  linear.silu = false;
  large.tokens = 32768;
  return {{"bf16 4096 x 8192", prefill, nullptr, "bias initial_state mask cu_seqlens final_state"},
          {"f32 4096 x 8192", f32, nullptr, "bias initial_state mask cu_seqlens final_state"},
          {"bf16 without silu", linear, nullptr, "bias initial_state mask cu_seqlens final_state"},
          {"bf16 decode 256 x 8192", decode, nullptr, "bias mask cu_seqlens"},
          {.label = "bf16 32768 x 8192",
           .desc = large,
           .left_out = "bias initial_state mask cu_seqlens final_state",
           .gpu_only = true}};
}

void causal_conv1d_aim(const CausalConvDesc& d, const CausalConv1d::Args& a, Rng& rng) {
  aim_sequences(d.rows(), a.cu_seqlens, rng);
  aim_mask(a.mask, rng);
}

}  // namespace bittern::oracle
