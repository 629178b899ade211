#include "ops/gguf/gguf_quantize/block_rules.h"
#include "oracle/aim.h"

namespace bittern::oracle {

namespace {

constexpr BlockType kWritten[] = {
    BlockType::q4_0, BlockType::q4_1, BlockType::q5_0, BlockType::q5_1, BlockType::q8_0,
    BlockType::q2_k, BlockType::q3_k, BlockType::q4_k, BlockType::q5_k, BlockType::q6_k};

bool can_be_given(BlockType type) { return type == BlockType::q4_k || type == BlockType::q5_k; }

}  // namespace

std::vector<GgufDesc> gguf_quantize_check_cases() {
  std::vector<GgufDesc> cases;
  for (const BlockType type : kWritten) {
    const std::int64_t block = block_size(type).weights;
    // A super-block is a long search in ref.
    const std::int64_t rows = block == 256 ? 3 : 7;
    for (const DType element : {DType::f32, DType::f16, DType::bf16}) {
      cases.push_back({5, 0, type, element});
      for (const std::int64_t blocks : {1, 2, 5})
        cases.push_back({rows, blocks * block, type, element});
      if (can_be_given(type)) cases.push_back({rows, 3 * block, type, element, true});
    }
    cases.push_back({0, block, type, DType::f32});
    cases.push_back({13, 1280, type, DType::f32});
  }
  return cases;
}

std::vector<BenchCase<GgufDesc>> gguf_quantize_bench_cases() {
  std::vector<BenchCase<GgufDesc>> cases;
  const auto ordinary = [](const GgufDesc&, std::string_view operand, const ConstView& view,
                           Rng& rng) {
    for (std::int64_t i = 0; i < view.shape.numel(); ++i) {
      if (operand == "scales") put(view, i, 0.25 + 0.1 * rng.uniform());
      if (operand == "biases") put(view, i, -2 - rng.uniform());
    }
  };
  for (const BlockType type : kWritten) {
    const auto label = "f32->" + std::string(kBlockTypeNames[static_cast<std::size_t>(type)]);
    GgufDesc d{8192, 4096, type};
    cases.push_back({.label = label, .desc = d, .left_out = "importance"});
    if (!can_be_given(type)) continue;
    d.given_grid = true;
    cases.push_back({label + " given grid", d, ordinary, "importance"});
  }
  return cases;
}

namespace {

// Of the formats of 256: what the groups' grids lead to, and super-blocks of one kind of group,
// where every d is decided by little.
void aim_super_blocks(const GgufDesc& d, const GgufQuantize::Args& a, Rng& rng) {
  const double most = static_cast<double>(largest_weight(d.type));
  for (std::int64_t i = 0; i < d.outer_size * d.axis_size / 256; ++i) {
    const double magnitude = std::ldexp(1.0, static_cast<int>(rng.below(25)) - 16);
    const std::int64_t kind = rng.below(12);
    if (kind == 0) continue;  // as filled: now and then NaN, infinite or huge
    const std::int64_t group = block_size(d.type).group;
    // Codes that are hit exactly or midway: those of the type, or more, which are then clamped.
    const auto rule = blocks::super_rule(d.type);
    const auto codes = static_cast<std::int64_t>(rule.high - rule.low) + (rng.chance(2) ? 1 : 13);
    for (std::int64_t g = 0; g < 256 / group; ++g) {
      double scale = magnitude * (0.1 + rng.uniform());
      if (rng.chance(2)) scale = -scale;
      const double low = rule.low < 0 ? static_cast<double>(rule.low) * scale
                                      : rng.normal() * scale * static_cast<double>(codes) / 2;
      for (std::int64_t j = 0; j < group; ++j) {
        double x = magnitude * rng.normal();
        switch (kind) {
          case 1: x = rng.chance(2) ? 0.0 : -0.0; break;
          case 2: x = std::ldexp(rng.normal(), -130); break;  // below every scale
          case 3: x = std::ldexp(rng.normal(), -20); break;   // subnormal d
          case 4: x = most * rng.normal(); break;
          case 5: x = std::abs(x); break;
          case 6: x = -std::abs(x) - 3 * magnitude; break;
          case 7: x = low; break;  // constant groups
          case 8: x = rng.chance(32) ? x * 50 : x; break;
          case 9:
            x = low + scale * static_cast<double>(rng.below(codes));
            x = step(d.element, x, static_cast<int>(rng.below(3)) - 1);
            break;
          case 10: x = low + scale * (static_cast<double>(rng.below(codes)) + 0.5); break;
          default: break;
        }
        put(a.w, i * 256 + g * group + j, x);
      }
    }
  }
  if (a.importance) {
    const std::int64_t kind = rng.below(5);
    for (std::int64_t j = 0; j < d.axis_size; ++j) {
      if (kind == 0) continue;  // as filled
      if (kind == 4) {          // nothing matters
        put(a.importance, j, 0);
        continue;
      }
      if (kind == 1 || !rng.chance(6)) put(a.importance, j, 0.01 + rng.uniform());
      if (kind == 2 && rng.chance(2)) put(a.importance, j, 0);
      if (kind == 3 && j / 32 % 2 == 0) put(a.importance, j, rng.chance(32) ? 1e30 : 0);
    }
  }
  if (!d.given_grid) return;
  for (std::int64_t g = 0; g < d.grid_shape().numel(); ++g) {
    if (rng.chance(8)) continue;  // as filled
    double low = 0, high = 0;
    for (std::int64_t j = 0; j < 32; ++j) {
      const double x = get(a.w, g * 32 + j);
      if (!(std::abs(x) <= most)) continue;
      low = j == 0 ? x : std::min(low, x);
      high = j == 0 ? x : std::max(high, x);
    }
    const double s = (high - low) / (d.type == BlockType::q4_k ? 15 : 31);
    const bool flipped = rng.chance(4);
    put(a.scales, g, flipped ? -s : s);
    put(a.biases, g, flipped ? high : low);
  }
}

}  // namespace

// Groups of 32 of every kind: a scale's ties, both signs of the largest magnitude, constants,
// zeros, subnormal, huge and not finite weights.
void gguf_quantize_aim(const GgufDesc& d, const GgufQuantize::Args& a, Rng& rng) {
  if (block_size(d.type).weights == 256) return aim_super_blocks(d, a, rng);
  const double most = static_cast<double>(largest_weight(d.type));
  const bool with_min = d.type == BlockType::q4_1 || d.type == BlockType::q5_1;
  const int n = d.type == BlockType::q4_0   ? 8
                : d.type == BlockType::q5_0 ? 16
                : d.type == BlockType::q4_1 ? 15
                : d.type == BlockType::q5_1 ? 31
                                            : 127;
  for (std::int64_t g = 0; g < d.outer_size * d.axis_size / 32; ++g) {
    const auto set = [&](std::int64_t j, double x) { put(a.w, g * 32 + j, x); };
    const auto set_all = [&](auto&& x) {
      for (std::int64_t j = 0; j < 32; ++j) set(j, x());
    };
    const double magnitude = std::ldexp(1.0, static_cast<int>(rng.below(25)) - 16);
    switch (rng.below(12)) {
      case 0: break;  // as filled: now and then NaN, infinite or huge
      case 1: {
        const double x = rng.normal();
        set_all([&] { return x; });
        break;
      }
      case 2: set_all([&] { return rng.chance(2) ? 0.0 : -0.0; }); break;
      case 3: set_all([&] { return std::ldexp(rng.normal(), -130); }); break;
      case 4: set_all([&] { return most * rng.normal(); }); break;
      case 5:
        set_all([&] { return step(d.element, most, static_cast<int>(rng.below(9)) - 4); });
        break;
      case 6: {
        const double x = std::abs(rng.normal()) + 2;
        set_all([&] { return rng.chance(8) ? (rng.chance(2) ? x : -x) : rng.normal(); });
        break;
      }
      case 7: set_all([&] { return -std::abs(rng.normal()) * magnitude; }); break;
      case 8:
        set_all([&] {
          const double x = magnitude * rng.normal();
          return x / (0.02 + rng.uniform());
        });
        break;
      default: {
        // Half steps, to within 2 ulp, of a scale that the ends give.
        const double s = magnitude * (rng.chance(2) ? 1.0 : 0.5 + rng.uniform());
        const double low = with_min ? rng.normal() * s * n : 0;
        set_all([&] {
          const double q = static_cast<double>(with_min ? rng.below(n) : rng.below(2 * n - 1) - n);
          return step(d.element, low + (q + 0.5) * s, static_cast<int>(rng.below(5)) - 2);
        });
        set(rng.below(16), low + (with_min ? 0 : -n) * s);
        if (with_min) set(16 + rng.below(16), low + n * s);
      }
    }
  }
}

}  // namespace bittern::oracle
