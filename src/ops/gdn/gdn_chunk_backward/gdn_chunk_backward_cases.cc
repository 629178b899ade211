#include "ops/gdn/gdn_aims.h"

namespace bittern::oracle {

std::vector<GdnDesc> gdn_chunk_backward_check_cases() {
  std::vector<GdnDesc> cases = gdn_cases(GdnChunkBackward::kFields);
  GdnDesc d{.tokens = 35, .key_heads = 2, .value_heads = 6, .key_dim = 12, .value_dim = 9};
  d.chunk = 16;
  d.sequences = 3;
  d.gate = d.qk_l2norm = d.beta_sigmoid = true;
  cases.push_back(d);
  return cases;
}

std::vector<BenchCase<GdnDesc>> gdn_chunk_backward_bench_cases() {
  const GdnDesc f32{.tokens = 4096, .key_heads = 16, .value_heads = 32};
  GdnDesc bf16 = f32, fused = f32;
  bf16.element = fused.element = DType::bf16;
  fused.qk_l2norm = fused.gate = fused.beta_sigmoid = true;
  const auto fill = [](const GdnDesc& d, std::string_view operand, const ConstView& view,
                       Rng& rng) {
    if (operand == "g" && !d.gate) aim_log_decay(view, rng);
  };
  return {{"f32 16/32 heads 128", f32, fill, "mask"},
          {"bf16 16/32 heads 128", bf16, fill, "mask"},
          {"bf16 16/32 heads 128 fused", fused, fill, "mask"}};
}

void gdn_chunk_backward_aim(const GdnDesc& d, const GdnChunkBackward::Args& a, Rng& rng) {
  aim_rule(d, a, rng);
  aim_values(a.d_o, 1, rng);
  aim_values(a.d_final_state, 1, rng);
}

}  // namespace bittern::oracle
