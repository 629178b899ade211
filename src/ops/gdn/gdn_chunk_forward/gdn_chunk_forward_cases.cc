#include "ops/gdn/gdn_aims.h"

namespace bittern::oracle {

std::vector<GdnDesc> gdn_chunk_forward_check_cases() {
  std::vector<GdnDesc> cases = gdn_cases(GdnChunkForward::kFields);
  // More value heads a key head than go together.
  GdnDesc d{.tokens = 35, .key_heads = 2, .value_heads = 14, .key_dim = 12, .value_dim = 9};
  d.chunk = 16;
  cases.push_back(d);
  d.head_map = HeadMap::tiled;
  cases.push_back(d);
  return cases;
}

std::vector<BenchCase<GdnDesc>> gdn_chunk_forward_bench_cases() {
  const GdnDesc f32{.tokens = 4096, .key_heads = 16, .value_heads = 32};
  GdnDesc bf16 = f32, fused = f32;
  bf16.element = fused.element = DType::bf16;
  fused.qk_l2norm = fused.gate = fused.beta_sigmoid = true;
  const auto fill = [](const GdnDesc& d, std::string_view operand, const ConstView& view,
                       Rng& rng) {
    if (operand == "g" && !d.gate) aim_log_decay(view, rng);
    if (operand == "mask")
      for (std::int64_t i = 0; i < view.shape.numel(); ++i) put(view, i, 1);
  };
  return {{"f32 16/32 heads 128", f32, fill, "mask"},
          {"bf16 16/32 heads 128", bf16, fill, "mask"},
          {"bf16 16/32 heads 128 fused", fused, fill}};
}

void gdn_chunk_forward_aim(const GdnDesc& d, const GdnChunkForward::Args& a, Rng& rng) {
  aim_rule(d, a, rng);
}

}  // namespace bittern::oracle
