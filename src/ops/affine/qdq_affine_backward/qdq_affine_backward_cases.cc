#include "ops/affine/affine_aims.h"

namespace bittern::oracle {

std::vector<AffineDesc> qdq_affine_backward_check_cases() {
  std::vector<AffineDesc> cases = affine_cases();
  // One row of many groups, rows of one group, and rows of several windows of codes.
  cases.push_back({.outer_size = 1, .axis_size = 128 * 64, .group_size = 128, .bits = 2});
  cases.push_back({.outer_size = 37, .axis_size = 32, .group_size = 32, .bits = 8});
  cases.push_back({.outer_size = 2,
                   .axis_size = 7 * 1001,
                   .group_size = 7,
                   .bits = 3,
                   .storage = CodeStorage::packed});
  return cases;
}

std::vector<BenchCase<AffineDesc>> qdq_affine_backward_bench_cases() {
  const AffineDesc base{.outer_size = 8192, .axis_size = 4096, .group_size = 64, .bits = 4};
  AffineDesc packed = base;
  packed.storage = CodeStorage::packed;
  AffineDesc large = base, large_packed = packed;
  large.outer_size = large_packed.outer_size = 16384;
  large.axis_size = large_packed.axis_size = 8192;
  return {
      {"f32 group 64", base},
      {"f32 group 64 packed 4 bit", packed},
      {.label = "f32 group 64 16384x8192", .desc = large, .gpu_only = true},
      {.label = "f32 group 64 packed 4 bit 16384x8192", .desc = large_packed, .gpu_only = true}};
}

// Random values already make the order of additions visible. A third of the groups get finite
// values of very different sizes, so that partial sums cancel; a few get only zeros of either sign,
// where padding with +0 shows.
void qdq_affine_backward_aim(const AffineDesc& d, const QdqAffineBackward::Args& a, Rng& rng) {
  const std::int64_t n = d.outer_size * d.axis_size;
  for (std::int64_t begin = 0; begin < n; begin += d.group_size) {
    const bool zeros = rng.chance(8);
    if (!zeros && !rng.chance(3)) continue;
    for (std::int64_t j = begin; j < begin + d.group_size; ++j) {
      const double sign = rng.chance(2) ? -1.0 : 1.0;
      const int exponent = static_cast<int>(rng.below(24)) - 12;
      put(a.d_y, j, zeros ? (rng.chance(9) ? 0.0 : -0.0) : sign * std::ldexp(1.0, exponent));
    }
  }
}

}  // namespace bittern::oracle
