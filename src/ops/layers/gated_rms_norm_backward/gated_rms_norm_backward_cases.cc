#include "ops/layers/layers_aims.h"

namespace bittern::oracle {

std::vector<GatedNormDesc> gated_rms_norm_backward_check_cases() { return gated_norm_cases(); }

std::vector<BenchCase<GatedNormDesc>> gated_rms_norm_backward_bench_cases() {
  const GatedNormDesc bf16{.rows = 32 * 4096, .dim = 128, .element = DType::bf16};
  GatedNormDesc f32 = bf16, large = bf16;
  f32.element = DType::f32;
  large.rows = 32 * 32768;
  return {{"bf16 131072 x 128", bf16},
          {"f32 131072 x 128", f32},
          {.label = "bf16 1048576 x 128", .desc = large, .gpu_only = true}};
}

void gated_rms_norm_backward_aim(const GatedNormDesc& d, const GatedRmsNormBackward::Args& a,
                                 Rng& rng) {
  aim_norm_rows(a.x, d.dim, rng);
  aim_gradient(a.d_y, rng);
  if (rng.chance(4)) return;
  for (const ConstView& v : {a.x, a.z, a.weight}) {
    for (std::int64_t i = 0; i < v.shape.numel(); ++i)
      if (!(std::fabs(get(v, i)) < 1e6)) put(v, i, rng.normal());
  }
}

}  // namespace bittern::oracle
