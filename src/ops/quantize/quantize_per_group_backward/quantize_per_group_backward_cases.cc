#include "ops/quantize/quantize_aims.h"

namespace bittern::oracle {

std::vector<QuantizeDesc> quantize_per_group_backward_check_cases() {
  return codeless_cases(QuantizePerGroupBackward::kFields);
}

std::vector<BenchCase<QuantizeDesc>> quantize_per_group_backward_bench_cases() {
  return codeless_bench_cases();
}

void quantize_per_group_backward_aim(const QuantizeDesc& d, const QuantizePerGroupBackward::Args& a,
                                     Rng& rng) {
  aim_scale(a.scale, rng);
  aim_quotient(d, a.x, a.scale, a.zero_point, rng);
}

}  // namespace bittern::oracle
