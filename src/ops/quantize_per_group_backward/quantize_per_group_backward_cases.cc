#include "oracle/aim.h"

namespace bittern::oracle {

std::vector<QuantizeDesc> quantize_per_group_backward_check_cases() {
  return quantize_cases(QuantizePerGroupBackward::kFields);
}

std::vector<BenchCase<QuantizeDesc>> quantize_per_group_backward_bench_cases() {
  const QuantizeDesc f32{.outer_size = 8192, .axis_size = 4096, .group_size = 128};
  QuantizeDesc bf16 = f32;
  bf16.element = DType::bf16;
  return {{"f32 group 128", f32}, {"bf16 group 128", bf16}};
}

void quantize_per_group_backward_aim(const QuantizeDesc& d, const QuantizePerGroupBackward::Args& a,
                                     Rng& rng) {
  aim_scale(a.scale, rng);
  aim_quotient(d, a.x, a.scale, a.zero_point, rng);
}

}  // namespace bittern::oracle
