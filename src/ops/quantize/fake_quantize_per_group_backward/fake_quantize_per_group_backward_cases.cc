#include "ops/quantize/quantize_aims.h"

namespace bittern::oracle {

std::vector<QuantizeDesc> fake_quantize_per_group_backward_check_cases() {
  return sum_cases(FakeQuantizePerGroupBackward::kFields);
}

std::vector<BenchCase<QuantizeDesc>> fake_quantize_per_group_backward_bench_cases() {
  return sum_bench_cases();
}

void fake_quantize_per_group_backward_aim(const QuantizeDesc& d,
                                          const FakeQuantizePerGroupBackward::Args& a, Rng& rng) {
  aim_scale(a.scale, rng);
  aim_quotient(d, a.x, a.scale, a.zero_point, rng);
  aim_gradient(a.d_y, rng);
}

}  // namespace bittern::oracle
