#include "ops/quantize/quantize_aims.h"

namespace bittern::oracle {

std::vector<QuantizeDesc> quantize_per_group_check_cases() {
  return quantize_cases(QuantizePerGroup::kFields);
}

std::vector<BenchCase<QuantizeDesc>> quantize_per_group_bench_cases() {
  const QuantizeDesc f32{.outer_size = 8192, .axis_size = 4096, .group_size = 128};
  QuantizeDesc bf16 = f32, token = f32, channel = f32;
  bf16.element = DType::bf16;
  token.granularity = Granularity::token;
  channel.granularity = Granularity::channel;
  return with_large_cases({{"f32->s8 group 128", f32},
                           {"bf16->s8 group 128", bf16},
                           {"f32->s8 token", token},
                           {"f32->s8 channel", channel}});
}

void quantize_per_group_aim(const QuantizeDesc& d, const QuantizePerGroup::Args& a, Rng& rng) {
  aim_scale(a.scale, rng);
  aim_quotient(d, a.x, a.scale, a.zero_point, rng);
}

}  // namespace bittern::oracle
