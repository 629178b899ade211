#include "ops/quantize/quantize_aims.h"

namespace bittern::oracle {

std::vector<QuantizeDesc> fake_quantize_per_group_check_cases() {
  return codeless_cases(FakeQuantizePerGroup::kFields);
}

std::vector<BenchCase<QuantizeDesc>> fake_quantize_per_group_bench_cases() {
  return codeless_bench_cases();
}

void fake_quantize_per_group_aim(const QuantizeDesc& d, const FakeQuantizePerGroup::Args& a,
                                 Rng& rng) {
  aim_scale(a.scale, rng);
  aim_quotient(d, a.x, a.scale, a.zero_point, rng);
}

}  // namespace bittern::oracle
