#include "ops/quantize/quantize_aims.h"

namespace bittern::oracle {

std::vector<QuantizeDesc> dequantize_per_group_backward_check_cases() {
  std::vector<QuantizeDesc> cases = quantize_cases(DequantizePerGroupBackward::kFields);
  const std::vector<QuantizeDesc> more = long_sum_cases(DequantizePerGroupBackward::kFields);
  cases.insert(cases.end(), more.begin(), more.end());
  return cases;
}

std::vector<BenchCase<QuantizeDesc>> dequantize_per_group_backward_bench_cases() {
  const QuantizeDesc base{.outer_size = 8192, .axis_size = 4096, .group_size = 128};
  std::vector<BenchCase<QuantizeDesc>> cases = {{"f32 group 128", base}};
  QuantizeDesc d = base;
  d.element = DType::bf16;
  cases.push_back({"bf16 group 128", d});
  return with_large_cases(std::move(cases));
}

void dequantize_per_group_backward_aim(const QuantizeDesc&,
                                       const DequantizePerGroupBackward::Args& a, Rng& rng) {
  aim_scale(a.scale, rng);
  aim_gradient(a.dy, rng);
}

}  // namespace bittern::oracle
