#include "ops/layers/layers_aims.h"

namespace bittern::oracle {

std::vector<RmsNormDesc> rms_norm_check_cases() {
  std::vector<RmsNormDesc> cases;
  for (const std::int64_t dim : {1, 7, 8, 16, 24, 33, 100, 128, 300}) {
    for (const DType element : {DType::f32, DType::bf16, DType::f16}) {
      const std::size_t turn = cases.size();
      cases.push_back({.rows = turn % 2 != 0 || dim > 32 ? 5 : 131,
                       .dim = dim,
                       .eps = turn % 5 == 0 ? 0.0 : 1e-6,
                       .offset = turn % 3 == 1 ? 1.0 : 0.0,
                       .element = element,
                       .rounding = turn % 4 < 2 ? NormRounding::once : NormRounding::each});
    }
  }
  cases.push_back({.rows = 3, .dim = 4097, .offset = -0.3, .element = DType::bf16});
  cases.push_back({.rows = 0, .dim = 16});
  return cases;
}

std::vector<BenchCase<RmsNormDesc>> rms_norm_bench_cases() {
  const RmsNormDesc bf16{.rows = 16384, .dim = 2048, .element = DType::bf16};
  RmsNormDesc f32 = bf16, small{.rows = 512, .dim = 576};
  f32.element = DType::f32;
  return {{.label = "bf16 16384 x 2048", .desc = bf16, .left_out = "residual sum"},
          {.label = "f32 16384 x 2048", .desc = f32, .left_out = "residual sum"},
          {.label = "f32 with a residual", .desc = f32},
          {.label = "f32 512 x 576", .desc = small, .left_out = "residual sum"}};
}

// Random rows; now and then one of zeros, of tiny or of huge values.
void rms_norm_aim(const RmsNormDesc& d, const RmsNorm::Args& a, Rng& rng) {
  aim_norm_rows(a.x, d.dim, rng);
}

}  // namespace bittern::oracle
