#include "ops/layers/layers_aims.h"

namespace bittern::oracle {

std::vector<GatedNormDesc> gated_rms_norm_check_cases() { return gated_norm_cases(); }

std::vector<BenchCase<GatedNormDesc>> gated_rms_norm_bench_cases() {
  const GatedNormDesc bf16{.rows = 32 * 4096, .dim = 128, .element = DType::bf16};
  GatedNormDesc f32 = bf16, each = bf16, large = bf16;
  f32.element = DType::f32;
  each.rounding = NormRounding::each;
  large.rows = 32 * 32768;
  return {{"bf16 131072 x 128", bf16},
          {"f32 131072 x 128", f32},
          {"bf16, each rounded", each},
          {.label = "bf16 1048576 x 128", .desc = large, .gpu_only = true}};
}

// Random rows; now and then one of zeros, of tiny or of huge values.
void gated_rms_norm_aim(const GatedNormDesc& d, const GatedRmsNorm::Args& a, Rng& rng) {
  aim_norm_rows(a.x, d.dim, rng);
}

}  // namespace bittern::oracle
