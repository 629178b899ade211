#include "ops/quantize/quantize_aims.h"

namespace bittern::oracle {

std::vector<QuantizeDesc> dequantize_per_group_check_cases() {
  return quantize_cases(DequantizePerGroup::kFields);
}

std::vector<BenchCase<QuantizeDesc>> dequantize_per_group_bench_cases() {
  const QuantizeDesc f32{.outer_size = 8192, .axis_size = 4096, .group_size = 128};
  QuantizeDesc bf16 = f32, token = f32, channel = f32;
  bf16.element = DType::bf16;
  token.granularity = Granularity::token;
  channel.granularity = Granularity::channel;
  return with_large_cases({{"s8->f32 group 128", f32},
                           {"s8->bf16 group 128", bf16},
                           {"s8->f32 token", token},
                           {"s8->f32 channel", channel}});
}

void dequantize_per_group_aim(const QuantizeDesc&, const DequantizePerGroup::Args& a, Rng& rng) {
  aim_scale(a.scale, rng);
}

}  // namespace bittern::oracle
