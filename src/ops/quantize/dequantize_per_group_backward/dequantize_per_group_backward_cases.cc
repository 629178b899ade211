#include "ops/quantize/quantize_aims.h"

namespace bittern::oracle {

std::vector<QuantizeDesc> dequantize_per_group_backward_check_cases() {
  return sum_cases(DequantizePerGroupBackward::kFields);
}

std::vector<BenchCase<QuantizeDesc>> dequantize_per_group_backward_bench_cases() {
  return sum_bench_cases();
}

void dequantize_per_group_backward_aim(const QuantizeDesc&,
                                       const DequantizePerGroupBackward::Args& a, Rng& rng) {
  aim_scale(a.scale, rng);
  aim_gradient(a.d_y, rng);
}

}  // namespace bittern::oracle
