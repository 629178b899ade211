#include "ops/quantize/quantize_aims.h"

namespace bittern::oracle {

std::vector<QuantizeDesc> dynamic_quantize_check_cases() {
  return sum_cases(DynamicQuantize::kFields);
}

std::vector<BenchCase<QuantizeDesc>> dynamic_quantize_bench_cases() {
  const QuantizeDesc base{.outer_size = 8192, .axis_size = 4096, .group_size = 128};
  std::vector<BenchCase<QuantizeDesc>> cases = {{"f32->s8 group 128", base}};
  QuantizeDesc d = base;
  d.element = DType::bf16;
  cases.push_back({"bf16->s8 group 128", d});
  d.granularity = Granularity::token;
  cases.push_back({"bf16->s8 token", d});
  d.element = DType::f32;
  cases.push_back({"f32->s8 token", d});
  return with_large_cases(std::move(cases));
}

// Per parameter: as it is, all of one sign, all zero, denormal, so wide that hi - lo overflows, or
// not one finite value; and x within 2 ulp of a tie of the scale that follows from its extreme.
void dynamic_quantize_aim(const QuantizeDesc& d, const DynamicQuantize::Args& a, Rng& rng) {
  const GroupGeometry g = d.geometry();
  const double largest = d.element == DType::f64    ? std::numeric_limits<double>::max()
                         : d.element == DType::f16  ? 65504
                         : d.element == DType::bf16 ? 0x1.fep127
                                                    : 0x1.fffffep127;
  const double tiny = d.element == DType::f64   ? 0x1p-1073
                      : d.element == DType::f16 ? 0x1p-24
                                                : 0x1p-149;
  const std::int64_t n = g.rows * g.row_length;
  std::vector<std::int64_t> kind(static_cast<std::size_t>(g.params));
  for (std::int64_t& k : kind) k = rng.below(10);
  const double extreme = 1 + rng.uniform();
  for (std::int64_t i = 0; i < n; ++i) {
    const double x = get(a.x, i);
    double to = x;
    switch (kind[static_cast<std::size_t>(g.param(i / g.row_length, i % g.row_length))]) {
      case 0: break;
      case 1: to = std::fabs(x); break;
      case 2: to = -std::fabs(x); break;
      case 3: to = rng.chance(2) ? 0.0 : -0.0; break;
      case 4: to = static_cast<double>(rng.below(9) - 4) * tiny; break;
      case 5: to = rng.chance(3) ? largest : rng.chance(2) ? -largest : x; break;
      case 6:
        to = rng.chance(2) ? std::numeric_limits<double>::quiet_NaN()
                           : std::copysign(std::numeric_limits<double>::infinity(), x);
        break;
      default: {
        // One value in eight is the extreme, so that it is likely to set the scale.
        const double s = d.symmetric ? extreme / d.q_max : 2 * extreme / (d.q_max - d.q_min);
        const double code = static_cast<double>(rng.below(64) - 32) + 0.5;
        to = rng.chance(8) ? (rng.chance(2) ? extreme : -extreme)
                           : std::clamp(code * s, -extreme, extreme);
        to = step(d.element, to, static_cast<int>(rng.below(3)) - 1);
      }
    }
    put(a.x, i, to);
  }
}

}  // namespace bittern::oracle
