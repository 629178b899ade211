#include "ops/gdn/gdn_aims.h"

namespace bittern::oracle {

std::vector<GdnDesc> gdn_state_check_cases() { return gdn_cases(GdnState::kFields); }

std::vector<BenchCase<GdnDesc>> gdn_state_bench_cases() {
  const GdnDesc f32{.tokens = 4096, .key_heads = 16, .value_heads = 32};
  GdnDesc bf16 = f32;
  bf16.element = DType::bf16;
  const auto fill = [](const GdnDesc&, std::string_view operand, const ConstView& view, Rng& rng) {
    if (operand == "g") aim_log_decay(view, rng);
  };
  return {{"f32 16/32 heads 128", f32, fill}, {"bf16 16/32 heads 128", bf16, fill}};
}

void gdn_state_aim(const GdnDesc& d, const GdnState::Args& a, Rng& rng) {
  aim_sequences(d.rows(), a.cu_seqlens, rng);
  for (const ConstView& x : {a.k, a.w, a.u}) aim_values(x, 0.3, rng);
  aim_values(a.initial_state, 1, rng);
  aim_log_decay(a.g, rng);
}

}  // namespace bittern::oracle
