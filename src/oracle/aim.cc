#include "oracle/aim.h"

#include <algorithm>

namespace bittern::oracle {

void aim_scale(const ConstView& scale, Rng& rng) {
  static constexpr double kBad[] = {0.0,
                                    -0.0,
                                    std::numeric_limits<double>::quiet_NaN(),
                                    std::numeric_limits<double>::infinity(),
                                    0x1p-140,
                                    0x1p-20,
                                    -1e-3};
  const std::int64_t n = scale.shape.numel();
  for (std::int64_t i = 0; i < n; ++i) {
    double s = 0.05 + rng.uniform();
    if (rng.chance(4)) s = std::ldexp(1.0, static_cast<int>(rng.below(9)) - 6);
    if (rng.chance(8)) s = -s;
    if (rng.chance(16)) s = kBad[rng.below(std::size(kBad))];
    put(scale, i, s);
  }
}

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

void aim_gradient(const ConstView& dy, Rng& rng) {
  const std::int64_t kind = rng.below(8), n = dy.shape.numel();
  if (kind == 0) return;
  for (std::int64_t i = 0; i < n; ++i) {
    if (kind == 1) {
      put(dy, i, rng.chance(2) ? 0.0 : -0.0);
    } else if (kind == 2) {
      put(dy, i, -0.0);
    } else if (!(std::fabs(get(dy, i)) < 1e6)) {
      put(dy, i, rng.normal());
    }
  }
}

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

std::vector<AffineDesc> affine_cases() {
  std::vector<AffineDesc> cases;
  std::size_t turn = 0;
  for (const std::int64_t group : {2, 3, 5, 16, 32, 48, 64, 80, 96, 128, 1000, 1024}) {
    for (const DType element : {DType::f32, DType::f64, DType::f16, DType::bf16}) {
      for (const bool f32_scale : {false, true}) {
        if (f32_scale && !is_half(element)) continue;
        for (const CodeStorage storage : {CodeStorage::u8, CodeStorage::packed}) {
          AffineDesc d{.outer_size = 3,
                       .axis_size = group * (group > 100 ? 3 : 19),
                       .group_size = group,
                       .element = element,
                       .storage = storage,
                       .f32_scale = f32_scale};
          const std::size_t pick = turn++ % 12;
          if (pick < 8) {
            d.bits = static_cast<std::int32_t>(pick) + 1;
          } else {
            static constexpr std::int32_t kBins[] = {3, 100, 255, 11};
            d.n_bins = kBins[pick - 8];
          }
          cases.push_back(d);
        }
      }
    }
  }
  cases.push_back({.outer_size = 0, .axis_size = 64});
  cases.push_back({.outer_size = 4, .axis_size = 0});
  cases.push_back({.outer_size = 40,
                   .axis_size = 64,
                   .group_size = 64,
                   .bits = 4,
                   .storage = CodeStorage::packed});
  cases.push_back({.outer_size = 2, .axis_size = 2048, .group_size = 64, .bits = 4});
  return cases;
}

std::vector<GdnDesc> gdn_cases(const GdnFields& fields) {
  struct Sizes {
    std::int64_t batch, tokens, key_heads, value_heads, key_dim, value_dim;
    std::int32_t chunk;
    std::int64_t n_sequences;
  };
  static constexpr Sizes kSizes[] = {
      {1, 1, 1, 1, 1, 1, 16, 0},      {2, 33, 2, 2, 17, 5, 16, 0},   {1, 70, 1, 3, 16, 24, 64, 0},
      {1, 100, 2, 6, 24, 17, 32, 4},  {1, 5, 1, 2, 128, 100, 64, 3}, {1, 129, 1, 1, 64, 32, 64, 0},
      {1, 0, 1, 1, 8, 8, 64, 2},      {0, 7, 1, 1, 8, 8, 64, 0},     {2, 0, 1, 2, 8, 8, 16, 0},
      {1, 18, 1, 1, 256, 250, 16, 0}, {1, 131, 1, 1, 50, 48, 64, 2}, {2, 64, 3, 3, 31, 20, 32, 0},
  };
  std::vector<GdnDesc> cases;
  std::size_t turn = 0;
  for (const Sizes& s : kSizes) {
    for (const DType element : {DType::f32, DType::f16, DType::bf16}) {
      if (!fields.keys && !fields.values && element != DType::f32) continue;
      // Ops with states have many operands to leave out: f16 and bf16 take turns.
      const DType skipped = (&s - kSizes) % 2 == 0 ? DType::f16 : DType::bf16;
      if (fields.state && element == skipped) continue;
      // Seven and three turns share no factor, so every pair of settings meets.
      const std::size_t bits = turn++ % 7;
      GdnDesc d{.batch = s.batch, .tokens = s.tokens, .value_heads = s.value_heads};
      d.chunk = s.chunk;
      d.n_sequences = s.n_sequences;
      if (fields.keys || fields.values) d.element = element;
      if (fields.keys) {
        d.key_heads = s.key_heads;
        d.key_dim = s.key_dim;
        d.head_map = (bits & 1) != 0 ? HeadMap::tiled : HeadMap::grouped;
      }
      if (fields.values) d.value_dim = s.value_dim;
      if (fields.matrix) d.a_element = (bits & 2) != 0 ? DType::bf16 : DType::f32;
      if (fields.triangle) d.lower_triangular = bits % 3 == 1;
      if (fields.state)
        d.state_layout = (bits & 2) != 0 ? StateLayout::value_key : StateLayout::key_value;
      if (fields.scale) d.scale = bits == 4 ? -0.3 : 0;
      if (fields.gate) d.gate = bits % 3 == 1;
      if (fields.fused) {
        d.qk_l2norm = (bits & 4) != 0;
        d.beta_sigmoid = bits % 3 == 2;
        d.allow_neg_eigval = bits == 5;
      }
      cases.push_back(d);
    }
  }
  return cases;
}

void aim_sequences(const GdnDesc& d, const ConstView& cu_seqlens, Rng& rng) {
  if (!cu_seqlens || d.n_sequences == 0) return;
  auto* at = data<std::int32_t>(cu_seqlens);
  at[0] = 0;
  for (std::int64_t i = 1; i < d.n_sequences; ++i)
    at[i] = rng.chance(3) ? 0 : static_cast<std::int32_t>(rng.below(d.tokens + 1));
  at[d.n_sequences] = static_cast<std::int32_t>(d.tokens);
  std::sort(at, at + d.n_sequences + 1);
}

void aim_values(const ConstView& x, double size, Rng& rng) {
  if (!x) return;
  const bool awkward = rng.chance(8);
  for (std::int64_t i = 0; i < x.shape.numel(); ++i) {
    const double value = get(x, i);
    if (!awkward && !(std::fabs(value) < 1e6)) put(x, i, size * rng.normal());
    if (std::fabs(value) < 1e6) put(x, i, size * value);
  }
}

void aim_log_decay(const ConstView& g, Rng& rng) {
  if (!g) return;
  static constexpr double kOthers[] = {0, -0.0, 0, -20, -100, -1e4, -1e-6};
  for (std::int64_t i = 0; i < g.shape.numel(); ++i)
    put(g, i, rng.chance(4) ? kOthers[rng.below(std::size(kOthers))] : -2 * rng.uniform());
}

void aim_beta(const ConstView& beta, Rng& rng) {
  if (!beta) return;
  for (std::int64_t i = 0; i < beta.shape.numel(); ++i)
    put(beta, i, rng.chance(8) ? (rng.chance(2) ? 0.0 : 2.0) : rng.uniform());
}

void aim_mask(const ConstView& mask, Rng& rng) {
  if (!mask) return;
  for (std::int64_t i = 0; i < mask.shape.numel(); ++i) put(mask, i, rng.chance(5) ? 0 : 1);
}

std::vector<CausalConvDesc> causal_conv_cases() {
  std::vector<CausalConvDesc> cases;
  static constexpr DType kElements[] = {DType::f32, DType::bf16, DType::f16};
  for (std::int32_t width = 2; width <= 4; ++width) {
    for (const std::int64_t channels : {1, 17, 131}) {
      for (const std::int64_t tokens : {1, 2, 66}) {
        if (channels > 100 && tokens == 2) continue;
        const std::size_t turn = cases.size();
        const bool packed = turn % 2 != 0;
        cases.push_back({.batch = packed ? 1 : 2,
                         .tokens = tokens,
                         .channels = channels,
                         .width = width,
                         .n_sequences = packed ? 3 : 0,
                         .element = kElements[turn % 3],
                         .silu = turn % 4 != 3});
      }
    }
  }
  // Channels that make whole packs.
  for (std::int32_t width = 2; width <= 4; ++width) {
    for (const DType element : kElements) {
      const bool packed = cases.size() % 2 != 0;
      cases.push_back({.batch = packed ? 1 : 2,
                       .tokens = 75,
                       .channels = 24,
                       .width = width,
                       .n_sequences = packed ? 4 : 0,
                       .element = element,
                       .silu = element != DType::f16});
    }
  }
  cases.push_back({.tokens = 600, .channels = 1, .n_sequences = 600});
  cases.push_back({.tokens = 300, .channels = 5, .n_sequences = 2});
  cases.push_back({.tokens = 0, .channels = 5, .n_sequences = 2});
  cases.push_back({.tokens = 5, .channels = 0});
  cases.push_back({.batch = 0, .tokens = 5, .channels = 3});
  return cases;
}

std::vector<GatedNormDesc> gated_norm_cases() {
  std::vector<GatedNormDesc> cases;
  for (const std::int64_t dim : {1, 7, 8, 16, 24, 33, 100, 128, 300}) {
    for (const DType element : {DType::f32, DType::bf16, DType::f16}) {
      const std::size_t turn = cases.size();
      cases.push_back({.rows = turn % 2 != 0 || dim > 32 ? 5 : 131,
                       .dim = dim,
                       .eps = turn % 5 == 0 ? 0.0 : 1e-6,
                       .element = element,
                       .rounding = turn % 4 < 2 ? NormRounding::once : NormRounding::each});
    }
  }
  for (const std::int64_t dim : {128, 256})
    for (const DType element : {DType::f32, DType::bf16, DType::f16})
      cases.push_back({.rows = 140, .dim = dim, .element = element});
  cases.push_back({.rows = 64 * 9, .dim = 3});
  cases.push_back({.rows = 64 * 513, .dim = 1});
  cases.push_back({.rows = 0, .dim = 16});
  return cases;
}

void aim_norm_rows(const GatedNormDesc& d, const ConstView& x, Rng& rng) {
  for (std::int64_t i = 0; i < d.rows; ++i) {
    if (!rng.chance(8)) continue;
    static constexpr double kSizes[] = {0, 1e-30, 1e18, 1e-4};
    const double size = kSizes[rng.below(std::size(kSizes))];
    for (std::int64_t j = 0; j < d.dim; ++j) put(x, i * d.dim + j, size * rng.normal());
  }
}

}  // namespace bittern::oracle
