#include "oracle/aim.h"

namespace bittern::oracle {

std::vector<QuantizeDesc> quantize_per_group_check_cases() {
  return quantize_cases(QuantizePerGroup::kFields);
}

std::vector<BenchCase<QuantizeDesc>> quantize_per_group_bench_cases() {
  const QuantizeDesc base{.outer_size = 8192, .axis_size = 4096, .group_size = 128};
  std::vector<BenchCase<QuantizeDesc>> cases = {{"f32->s8 group 128", base}};
  QuantizeDesc d = base;
  d.element = DType::bf16;
  cases.push_back({"bf16->s8 group 128", d});
  return cases;
}

void quantize_per_group_aim(const QuantizeDesc& d, const QuantizePerGroup::Args& a, Rng& rng) {
  aim_scale(a.scale, rng);
  aim_quotient(d, a.x, a.scale, a.zero_point, rng);
}

}  // namespace bittern::oracle
