#include "ops/gguf_quantize/block_rules.h"
#include "oracle/aim.h"

namespace bittern::oracle {

namespace {
constexpr BlockType kWritten[] = {BlockType::q4_0, BlockType::q4_1, BlockType::q5_0,
                                  BlockType::q5_1, BlockType::q8_0};
}

std::vector<GgufDesc> gguf_quantize_check_cases() {
  std::vector<GgufDesc> cases;
  for (const BlockType type : kWritten) {
    const std::int64_t block = block_size(type).weights;
    for (const DType element : {DType::f32, DType::f16, DType::bf16}) {
      cases.push_back({5, 0, type, element});
      for (const std::int64_t blocks : {1, 2, 5})
        cases.push_back({7, blocks * block, type, element});
    }
    cases.push_back({0, block, type, DType::f32});
    cases.push_back({13, 40 * block, type, DType::f32});
  }
  return cases;
}

std::vector<BenchCase<GgufDesc>> gguf_quantize_bench_cases() {
  std::vector<BenchCase<GgufDesc>> cases;
  for (const BlockType type : kWritten)
    cases.push_back({"f32->" + std::string(kBlockTypeNames[static_cast<std::size_t>(type)]),
                     {8192, 4096, type, DType::f32}});
  return cases;
}

// Groups of 32 of every kind: a scale's ties, both signs of the largest magnitude, constants,
// zeros, subnormal, huge and not finite weights.
void gguf_quantize_aim(const GgufDesc& d, const GgufQuantize::Args& a, Rng& rng) {
  const double most = static_cast<double>(blocks::limit(d.type));
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
      case 8: set_all([&] { return magnitude * rng.normal() / (0.02 + rng.uniform()); }); break;
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
