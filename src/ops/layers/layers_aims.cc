#include "ops/layers/layers_aims.h"

#include <algorithm>

#include "core/activations.h"

namespace bittern::oracle {

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
                         .sequences = packed ? 3 : 0,
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
                       .sequences = packed ? 4 : 0,
                       .element = element,
                       .silu = element != DType::f16});
    }
  }
  cases.push_back({.tokens = 600, .channels = 1, .sequences = 600});
  cases.push_back({.tokens = 300, .channels = 5, .sequences = 2});
  cases.push_back({.tokens = 0, .channels = 5, .sequences = 2});
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

void aim_norm_rows(const ConstView& x, std::int64_t dim, Rng& rng) {
  for (std::int64_t i = 0; i < x.shape.numel() / dim; ++i) {
    if (!rng.chance(8)) continue;
    static constexpr double kSizes[] = {0, 1e-30, 1e18, 1e-4};
    const double size = kSizes[rng.below(std::size(kSizes))];
    for (std::int64_t j = 0; j < dim; ++j) put(x, i * dim + j, size * rng.normal());
  }
}

std::vector<GatedActivationDesc> gated_activation_cases() {
  std::vector<GatedActivationDesc> cases;
  for (const std::int64_t dim : {1, 8, 17, 64, 131}) {
    for (const DType element : {DType::f32, DType::bf16, DType::f16}) {
      for (const GatedKind kind :
           {GatedKind::swiglu, GatedKind::geglu_tanh, GatedKind::geglu_erf}) {
        const std::size_t turn = cases.size();
        cases.push_back({.rows = dim < 20 ? 37 : 9,
                         .dim = dim,
                         .kind = kind,
                         .element = element,
                         .rounding = turn % 2 == 0 ? NormRounding::once : NormRounding::each});
      }
    }
  }
  cases.push_back({.rows = 0, .dim = 16});
  return cases;
}

void aim_gates(const ConstView& gate, Rng& rng) {
  static constexpr double kAt[] = {0.0,
                                   -0.0,
                                   static_cast<double>(math::kGeluMost),
                                   -static_cast<double>(math::kGeluMost),
                                   static_cast<double>(math::kExpLeast),
                                   -static_cast<double>(math::kExpLeast),
                                   -87.3,
                                   -5.4,
                                   -9.2};
  for (std::int64_t i = 0; i < gate.shape.numel(); ++i) {
    if (rng.chance(3)) put(gate, i, 10 * rng.normal());
    if (!rng.chance(4)) continue;
    const double at = kAt[rng.below(std::size(kAt))];
    put(gate, i, step(gate.dtype, at, static_cast<int>(rng.below(5)) - 2));
  }
}

}  // namespace bittern::oracle
