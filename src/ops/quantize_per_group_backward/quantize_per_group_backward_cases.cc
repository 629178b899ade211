#include "oracle/aim.h"

namespace bittern::oracle {

std::vector<QuantizeDesc> quantize_per_group_backward_check_cases() {
  std::vector<QuantizeDesc> cases = quantize_cases(QuantizePerGroupBackward::kFields);
  // No code is stored, so the range may be any: without 0, and wider than f32 has integers.
  struct Range {
    std::int32_t q_min, q_max;
  };
  for (const Range& range : {Range{-65536, 65535},
                             {-(1 << 30) * 2, (1 << 30) - 1},
                             {3, 9},
                             {1 << 24, (1 << 24) + 300},
                             {-8388609, 8388609}}) {
    for (const DType element : {DType::f32, DType::f64, DType::f16, DType::bf16}) {
      for (const std::int64_t group : {5, 64, 240})
        cases.push_back({.outer_size = 3,
                         .axis_size = 960,
                         .group_size = group,
                         .q_min = range.q_min,
                         .q_max = range.q_max,
                         .element = element});
    }
  }
  return cases;
}

std::vector<BenchCase<QuantizeDesc>> quantize_per_group_backward_bench_cases() {
  const QuantizeDesc f32{.outer_size = 8192, .axis_size = 4096, .group_size = 128};
  QuantizeDesc bf16 = f32, token = f32, channel = f32;
  bf16.element = DType::bf16;
  token.granularity = Granularity::token;
  channel.granularity = Granularity::channel;
  return {{"f32 group 128", f32},
          {"bf16 group 128", bf16},
          {"f32 token", token},
          {"f32 channel", channel}};
}

void quantize_per_group_backward_aim(const QuantizeDesc& d, const QuantizePerGroupBackward::Args& a,
                                     Rng& rng) {
  aim_scale(a.scale, rng);
  aim_quotient(d, a.x, a.scale, a.zero_point, rng);
}

}  // namespace bittern::oracle
