#include "ops/affine/affine_aims.h"

#include <algorithm>

namespace bittern::oracle {

std::vector<AffineDesc> affine_cases() {
  std::vector<AffineDesc> cases;
  std::size_t turn = 0;
  for (const std::int64_t group : {2, 3, 5, 16, 32, 48, 64, 80, 96, 128, 1000, 1024}) {
    for (const DType element : {DType::f32, DType::f64, DType::f16, DType::bf16}) {
      for (const bool f32_scale : {false, true}) {
        if (f32_scale && !is_half(element)) continue;
        for (const CodeStorage storage : {CodeStorage::u8, CodeStorage::packed}) {
          AffineDesc d{.outer_size = 3,
                       .axis_size = group * (group > 100 ? 3 : 19),
                       .group_size = group,
                       .element = element,
                       .storage = storage,
                       .f32_scale = f32_scale};
          const std::size_t pick = turn++ % 12;
          if (pick < 8) {
            d.bits = static_cast<std::int32_t>(pick) + 1;
          } else {
            static constexpr std::int32_t kBins[] = {3, 100, 255, 11};
            d.n_bins = kBins[pick - 8];
          }
          cases.push_back(d);
        }
      }
    }
  }
  cases.push_back({.outer_size = 0, .axis_size = 64});
  cases.push_back({.outer_size = 4, .axis_size = 0});
  cases.push_back({.outer_size = 40,
                   .axis_size = 64,
                   .group_size = 64,
                   .bits = 4,
                   .storage = CodeStorage::packed});
  cases.push_back({.outer_size = 2, .axis_size = 2048, .group_size = 64, .bits = 4});
  return cases;
}

std::vector<PackDesc> pack_cases(std::int32_t large_bits) {
  std::vector<PackDesc> cases;
  for (std::int32_t bits = 1; bits <= 8; ++bits) {
    for (const std::int64_t axis : {0, 1, 7, 8, 31, 32, 33, 63, 64, 65, 127, 160, 200, 1000, 4133})
      cases.push_back({.outer_size = 3, .axis_size = axis, .bits = bits});
    cases.push_back({.outer_size = 0, .axis_size = 64, .bits = bits});
  }
  // Large enough for streaming stores, with rows of several chunks and a tail.
  cases.push_back({.outer_size = 110, .axis_size = 9999, .bits = large_bits});
  return cases;
}

std::vector<BenchCase<PackDesc>> pack_bench_cases() {
  return {{"4 bit", {.outer_size = 8192, .axis_size = 4096, .bits = 4}},
          {"3 bit", {.outer_size = 8192, .axis_size = 4096, .bits = 3}},
          {.label = "4 bit 16384x8192",
           .desc = {.outer_size = 16384, .axis_size = 8192, .bits = 4},
           .gpu_only = true},
          {.label = "3 bit 16384x8192",
           .desc = {.outer_size = 16384, .axis_size = 8192, .bits = 3},
           .gpu_only = true}};
}

}  // namespace bittern::oracle
