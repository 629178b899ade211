#include "core/activations.h"
#include "ops/layers/layers_aims.h"

namespace bittern::oracle {

std::vector<GatedActivationDesc> gated_activation_backward_check_cases() {
  std::vector<GatedActivationDesc> cases = gated_activation_cases();
  for (GatedActivationDesc& d : cases) d.rounding = NormRounding::once;  // no field of the op
  return cases;
}

std::vector<BenchCase<GatedActivationDesc>> gated_activation_backward_bench_cases() {
  const GatedActivationDesc f32{.rows = 1024, .dim = 8192};
  GatedActivationDesc bf16 = f32, tanh = f32, erf = f32;
  bf16.element = DType::bf16;
  tanh.kind = GatedKind::geglu_tanh;
  erf.kind = GatedKind::geglu_erf;
  return {{"f32 1024 x 8192", f32},
          {"bf16 1024 x 8192", bf16},
          {"f32 geglu_tanh", tanh},
          {"f32 geglu_erf", erf}};
}

// The forward's gates, and some where gelu_tanh's slope ends.
void gated_activation_backward_aim(const GatedActivationDesc&,
                                   const GatedActivationBackward::Args& a, Rng& rng) {
  aim_gates(a.gate, rng);
  for (std::int64_t i = 0; i < a.gate.shape.numel(); ++i) {
    if (!rng.chance(12)) continue;
    const auto most = static_cast<double>(math::kGeluTanhMost);
    const double at = rng.chance(2) ? most : -most;
    put(a.gate, i, step(a.gate.dtype, at, static_cast<int>(rng.below(5)) - 2));
  }
  aim_gradient(a.d_y, rng);
}

}  // namespace bittern::oracle
