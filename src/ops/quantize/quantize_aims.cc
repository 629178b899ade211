#include "ops/quantize/quantize_aims.h"

#include <algorithm>

namespace bittern::oracle {

void aim_quotient(const QuantizeDesc& d, const ConstView& x, const ConstView& scale,
                  const ConstView& zero_point, Rng& rng) {
  const GroupGeometry g = d.geometry();
  const std::int64_t n = g.rows * g.row_length;
  for (std::int64_t i = 0; i < n; ++i) {
    if (rng.chance(2)) continue;
    const std::int64_t p = g.param(i / g.row_length, i % g.row_length);
    const double s = get(scale, p);
    const double zp = zero_point ? get(zero_point, p) : 0;
    double code = 0;
    switch (rng.below(4)) {
      case 0: code = d.q_min - zp + static_cast<double>(rng.below(3) - 1); break;
      case 1: code = d.q_max - zp + static_cast<double>(rng.below(3) - 1); break;
      default: code = static_cast<double>(rng.below(64) - 32);
    }
    code += rng.chance(4) ? 0.0 : rng.chance(2) ? 0.5 : -0.5;
    const double at = get(x, i);  // keeps NaN and infinities where fill() put them
    if (!std::isfinite(at)) continue;
    put(x, i, step(d.element, code * s, static_cast<int>(rng.below(5)) - 2));
  }
}

std::vector<QuantizeDesc> quantize_cases(const QuantizeFields& fields) {
  std::vector<QuantizeDesc> geometries;
  for (const std::int64_t group : {1, 3, 5, 16, 31, 33, 48, 64, 80, 96, 128, 1000})
    geometries.push_back(
        {.outer_size = group > 100 ? 3 : 5, .axis_size = group * 3, .group_size = group});
  geometries.push_back(
      {.outer_size = 18, .axis_size = 128, .group_size = 128});  // 16 rows and a rest
  geometries.push_back({.outer_size = 3, .axis_size = 64 * 19, .group_size = 64});
  geometries.push_back({.outer_size = 0, .axis_size = 64, .group_size = 64});
  geometries.push_back({.outer_size = 4, .axis_size = 0, .group_size = 64});
  for (const std::int64_t axis : {1, 17, 200, 1025})
    geometries.push_back({.outer_size = 6, .axis_size = axis, .granularity = Granularity::token});
  for (const auto& [outer, axis, inner] : {std::array<std::int64_t, 3>{7, 37, 1},
                                           {1, 16, 40},
                                           {3, 5, 3},
                                           {4, 2, 129},
                                           {65, 19, 1},
                                           {33, 48, 1},
                                           {2, 0, 4},
                                           {0, 6, 2}})
    geometries.push_back({.outer_size = outer,
                          .axis_size = axis,
                          .inner_size = inner,
                          .granularity = Granularity::channel});
  for (const std::int64_t axis : {1, 33, 700, 4099})
    geometries.push_back({.outer_size = 3, .axis_size = axis, .granularity = Granularity::tensor});
  geometries.push_back({.outer_size = 0, .axis_size = 3, .granularity = Granularity::tensor});

  struct Range {
    DType code;
    std::int32_t q_min, q_max;
  };
  static constexpr Range kRanges[] = {{DType::s8, -128, 127}, {DType::u8, 0, 255},
                                      {DType::s8, -8, 7},     {DType::u8, 0, 3},
                                      {DType::s8, -1, 100},   {DType::u8, 5, 6}};
  std::vector<QuantizeDesc> cases;
  std::size_t turn = 0;
  for (const QuantizeDesc& base : geometries) {
    for (const DType element : {DType::f32, DType::f64, DType::f16, DType::bf16}) {
      for (const bool f32_scale : {false, true}) {
        if (f32_scale && !is_half(element)) continue;
        for (const bool symmetric : {true, false}) {
          if (!symmetric && !fields.symmetric) continue;
          // Every pair of ranges over the geometries; both codes for each.
          for (std::size_t k = 0; k < 2; ++k) {
            const Range& range = kRanges[(turn++) % std::size(kRanges)];
            QuantizeDesc d = base;
            d.element = element;
            d.f32_scale = f32_scale;
            if (fields.code) d.code = range.code;
            if (fields.range) {
              d.q_min = range.q_min;
              d.q_max = range.q_max;
            }
            if (fields.symmetric) d.symmetric = symmetric;
            cases.push_back(d);
          }
        }
      }
    }
  }
  return cases;
}

namespace {

// Lengths around blocks of partial sums, columns in several units, and parameters without elements.
std::vector<QuantizeDesc> long_sum_cases(const QuantizeFields& fields) {
  std::vector<QuantizeDesc> cases;
  const auto add = [&](std::int64_t outer, std::int64_t axis, std::int64_t inner,
                       Granularity granularity) {
    for (const DType element : {DType::f32, DType::bf16, DType::f64}) {
      QuantizeDesc d{.outer_size = outer,
                     .axis_size = axis,
                     .inner_size = inner,
                     .group_size = 4099,
                     .granularity = granularity,
                     .element = element};
      if (fields.code && cases.size() % 2 != 0) {
        d.code = DType::u8;
        d.q_min = 0;
      }
      if (fields.symmetric) d.symmetric = cases.size() % 3 != 0;
      cases.push_back(d);
    }
  };
  add(1, 2 * 4099, 1, Granularity::group);
  for (const std::int64_t axis : {0, 2048, 2049, 9000}) add(3, axis, 1, Granularity::token);
  for (const std::int64_t outer : {1, 2, 3, 1000, 4099}) add(outer, 3, 1, Granularity::channel);
  add(9, 700, 1, Granularity::channel);
  add(2050, 1, 1, Granularity::channel);
  add(5, 3, 700, Granularity::channel);
  add(4, 5, 0, Granularity::channel);
  add(3, 0, 1, Granularity::tensor);
  add(5000, 1, 1, Granularity::tensor);
  add(7, 5003, 1, Granularity::tensor);
  add(32, 1024, 1, Granularity::tensor);
  return cases;
}

}  // namespace

std::vector<QuantizeDesc> sum_cases(const QuantizeFields& fields) {
  std::vector<QuantizeDesc> cases = quantize_cases(fields);
  const std::vector<QuantizeDesc> more = long_sum_cases(fields);
  cases.insert(cases.end(), more.begin(), more.end());
  return cases;
}

std::vector<BenchCase<QuantizeDesc>> sum_bench_cases() {
  const QuantizeDesc f32{.outer_size = 8192, .axis_size = 4096, .group_size = 128};
  QuantizeDesc bf16 = f32;
  bf16.element = DType::bf16;
  return with_large_cases({{"f32 group 128", f32}, {"bf16 group 128", bf16}});
}

std::vector<QuantizeDesc> codeless_cases(const QuantizeFields& fields) {
  std::vector<QuantizeDesc> cases = quantize_cases(fields);
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

std::vector<BenchCase<QuantizeDesc>> codeless_bench_cases() {
  const QuantizeDesc f32{.outer_size = 8192, .axis_size = 4096, .group_size = 128};
  QuantizeDesc bf16 = f32, token = f32, channel = f32;
  bf16.element = DType::bf16;
  token.granularity = Granularity::token;
  channel.granularity = Granularity::channel;
  return with_large_cases({{"f32 group 128", f32},
                           {"bf16 group 128", bf16},
                           {"f32 token", token},
                           {"f32 channel", channel}});
}

std::vector<BenchCase<QuantizeDesc>> with_large_cases(std::vector<BenchCase<QuantizeDesc>> cases) {
  const std::size_t small = cases.size();
  for (std::size_t i = 0; i < small; ++i) {
    BenchCase<QuantizeDesc> large = cases[i];
    large.label += " 16384x8192";
    large.desc.outer_size = 16384;
    large.desc.axis_size = 8192;
    large.gpu_only = true;
    cases.push_back(large);
  }
  return cases;
}

}  // namespace bittern::oracle
