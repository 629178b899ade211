#include "ops/affine/affine_aims.h"

namespace bittern::oracle {

std::vector<AffineDesc> qdq_affine_forward_check_cases() {
  std::vector<AffineDesc> cases;
  for (const AffineRounding rounding : {AffineRounding::once, AffineRounding::mlx}) {
    for (AffineDesc d : affine_cases()) {
      d.rounding = rounding;
      cases.push_back(d);
    }
  }
  // Rows of several chunks, the second large enough for streaming stores.
  cases.push_back({.outer_size = 1, .axis_size = 9990, .group_size = 30, .bits = 3});
  cases.push_back({.outer_size = 30, .axis_size = 9600, .group_size = 96, .bits = 4});
  return cases;
}

std::vector<BenchCase<AffineDesc>> qdq_affine_forward_bench_cases() {
  const AffineDesc base{.outer_size = 8192, .axis_size = 4096, .group_size = 64, .bits = 4};
  AffineDesc packed = base, half = base;
  packed.storage = CodeStorage::packed;
  half.element = DType::bf16;
  AffineDesc large = base, large_packed = packed;
  large.outer_size = large_packed.outer_size = 16384;
  large.axis_size = large_packed.axis_size = 8192;
  return {
      {"f32 group 64", base},
      {"f32 group 64 packed 4 bit", packed},
      {"bf16 group 64", half},
      {.label = "f32 group 64 16384x8192", .desc = large, .gpu_only = true},
      {.label = "f32 group 64 packed 4 bit 16384x8192", .desc = large_packed, .gpu_only = true}};
}

// About half the biases nearly cancel a product, where one rounding and two differ most.
void qdq_affine_forward_aim(const AffineDesc& d, const QdqAffineForward::Args& a, Rng& rng) {
  aim_scale(a.scales, rng);
  const std::int64_t groups = a.biases.shape.numel();
  for (std::int64_t i = 0; i < groups; ++i) {
    const double s = get(a.scales, i);
    if (rng.chance(2) || !std::isfinite(s)) continue;
    const double code = static_cast<double>(rng.below(std::int64_t{1} << d.code_bits()));
    put(a.biases, i, step(d.scale_element(), -code * s, static_cast<int>(rng.below(5)) - 2));
  }
}

}  // namespace bittern::oracle
