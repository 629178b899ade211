#include "ops/layers/layers_aims.h"

namespace bittern::oracle {

std::vector<GatedActivationDesc> gated_activation_check_cases() { return gated_activation_cases(); }

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

void gated_activation_aim(const GatedActivationDesc&, const GatedActivation::Args& a, Rng& rng) {
  aim_gates(a.gate, rng);
}

}  // namespace bittern::oracle
