#include "oracle/aim.h"

namespace bittern::oracle {

std::vector<AdamDesc> adam_check_cases() {
  std::vector<AdamDesc> cases;
  for (const std::int64_t count : {1, 7, 8, 16, 17, 100, 1031}) {
    for (const std::int64_t step : {1, 2, 1000}) {
      const std::size_t turn = cases.size();
      cases.push_back({.count = count,
                       .rate = turn % 4 == 3 ? -0.5 : 1e-3,
                       .beta1 = turn % 5 == 2 ? 0.0 : 0.9,
                       .beta2 = turn % 5 == 4 ? 0.0 : 0.999,
                       .epsilon = turn % 3 == 0 ? 0.0 : 1e-8,
                       .step = step});
    }
  }
  cases.push_back({.count = 40, .step = std::int64_t{1} << 40});
  cases.push_back({.count = 0});
  return cases;
}

std::vector<BenchCase<AdamDesc>> adam_bench_cases() {
  return {{"f32 16M", {.count = 1 << 24, .step = 10}}, {"f32 64k", {.count = 1 << 16, .step = 10}}};
}

// Variances that are 0 or positive, as they come, but for a few; gradients that vanish when they
// are squared, or overflow.
void adam_aim(const AdamDesc& d, const Adam::Args& a, Rng& rng) {
  static constexpr double kGradients[] = {0, -0.0, 1e-30, -1e30, 1e-20, 2e19};
  const ConstView variance = as_const(a.variance);
  for (std::int64_t i = 0; i < d.count; ++i) {
    if (!rng.chance(16)) put(variance, i, std::fabs(get(variance, i)));
    if (rng.chance(4)) put(variance, i, 0);
    if (rng.chance(8)) put(a.gradient, i, kGradients[rng.below(std::size(kGradients))]);
  }
}

}  // namespace bittern::oracle
