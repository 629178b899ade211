#include "ops/layers/layers_aims.h"

namespace bittern::oracle {

// The rows and lengths of the gated norm: blocks of rows that are whole, short and many.
std::vector<RmsNormDesc> rms_norm_backward_check_cases() {
  std::vector<RmsNormDesc> cases;
  for (const GatedNormDesc& d : gated_norm_cases()) {
    cases.push_back({.rows = d.rows,
                     .dim = d.dim,
                     .eps = d.eps,
                     .offset = cases.size() % 3 == 1 ? 1.0 : 0.0,
                     .element = d.element});
  }
  cases.push_back({.rows = 66, .dim = 64, .offset = -0.3});  // rows as two axes
  return cases;
}

std::vector<BenchCase<RmsNormDesc>> rms_norm_backward_bench_cases() {
  const RmsNormDesc f32{.rows = 16384, .dim = 2048};
  RmsNormDesc bf16 = f32, small{.rows = 1024, .dim = 576}, heads{.rows = 12288, .dim = 64};
  bf16.element = DType::bf16;
  return {{.label = "f32 16384 x 2048", .desc = f32},
          {.label = "f32 without d_weight", .desc = f32, .left_out = "d_sum d_weight"},
          {.label = "bf16 16384 x 2048", .desc = bf16},
          {.label = "f32 1024 x 576", .desc = small, .left_out = "d_weight"},
          {.label = "f32 12288 x 64", .desc = heads, .left_out = "d_sum d_weight"}};
}

// Random rows; now and then one of zeros, of tiny or of huge values. Mostly finite, since one NaN
// spoils its row and its column.
void rms_norm_backward_aim(const RmsNormDesc& d, const RmsNormBackward::Args& a, Rng& rng) {
  aim_norm_rows(a.x, d.dim, rng);
  aim_gradient(a.d_y, rng);
  const bool awkward = rng.chance(4);
  for (const ConstView& v : {a.x, a.weight}) {
    for (std::int64_t i = 0; i < v.shape.numel() && !awkward; ++i)
      if (!(std::fabs(get(v, i)) < 1e6)) put(v, i, rng.normal());
  }
  if (a.d_sum) aim_gradient(a.d_sum, rng);
}

}  // namespace bittern::oracle
