#include "core/activations.h"
#include "ops/layers/layers_aims.h"

namespace bittern::oracle {

std::vector<GatedActivationDesc> gated_activation_check_cases() {
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

std::vector<BenchCase<GatedActivationDesc>> gated_activation_bench_cases() {
  const GatedActivationDesc bf16{.rows = 4096, .dim = 8192, .element = DType::bf16};
  GatedActivationDesc f32 = bf16, tanh = bf16, erf = bf16;
  f32.element = DType::f32;
  tanh.kind = GatedKind::geglu_tanh;
  erf.kind = GatedKind::geglu_erf;
  return {{"bf16 4096 x 8192", bf16},
          {"f32 4096 x 8192", f32},
          {"bf16 geglu_tanh", tanh},
          {"bf16 geglu_erf", erf}};
}

// Gates around 0 and around every threshold of the functions, and large ones.
void gated_activation_aim(const GatedActivationDesc&, const GatedActivation::Args& a, Rng& rng) {
  static constexpr double kAt[] = {0.0,
                                   -0.0,
                                   static_cast<double>(math::kGeluMost),
                                   -static_cast<double>(math::kGeluMost),
                                   static_cast<double>(math::kExpLeast),
                                   -static_cast<double>(math::kExpLeast),
                                   -87.3,
                                   -5.4,
                                   -9.2};
  for (std::int64_t i = 0; i < a.gate.shape.numel(); ++i) {
    if (rng.chance(3)) put(a.gate, i, 10 * rng.normal());
    if (!rng.chance(4)) continue;
    const double at = kAt[rng.below(std::size(kAt))];
    put(a.gate, i, step(a.gate.dtype, at, static_cast<int>(rng.below(5)) - 2));
  }
}

}  // namespace bittern::oracle
