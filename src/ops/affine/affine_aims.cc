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

}  // namespace bittern::oracle
