#include "ops/gdn/gdn_aims.h"

namespace bittern::oracle {

std::vector<GdnDesc> gdn_solve_check_cases() { return gdn_cases(GdnSolve::kFields); }

std::vector<BenchCase<GdnDesc>> gdn_solve_bench_cases() {
  const GdnDesc f32{.tokens = 4096, .value_heads = 32};
  GdnDesc large{.tokens = 32768, .value_heads = 32}, large_bf16 = large;
  large_bf16.a_element = DType::bf16;
  return {{"32 heads f32", f32},
          {"T 32768 32 heads, A bf16", large_bf16, nullptr, "", Preference::exact, true},
          {"T 32768 32 heads, A f32", large, nullptr, "", Preference::exact, true}};
}

void gdn_solve_aim(const GdnDesc& d, const GdnSolve::Args& a, Rng& rng) {
  aim_sequences(d.rows(), a.cu_seqlens, rng);
  aim_values(a.l, 0.1, rng);
}

}  // namespace bittern::oracle
