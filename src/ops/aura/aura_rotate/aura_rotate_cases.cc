#include "ops/aura/aura_aims.h"

namespace bittern::oracle {

std::vector<AuraDesc> aura_rotate_check_cases() {
  std::vector<AuraDesc> cases;
  for (AuraDesc d : aura_cases()) {
    d.bits = 4;  // not read
    d.inverse = cases.size() % 2 != 0;
    cases.push_back(d);
  }
  return cases;
}

std::vector<BenchCase<AuraDesc>> aura_rotate_bench_cases() {
  const AuraDesc hadamard{.rows = 1 << 16, .dim = 128};
  AuraDesc kronecker = hadamard, dense = hadamard;
  kronecker.dim = 192;
  dense.rotation = Rotation::dense;
  AuraDesc large = hadamard;
  large.rows = 1 << 20;
  large.element = DType::bf16;
  return {{"hadamard d128 f32", hadamard, fill_aura},
          {"hadamard d192 f32", kronecker, fill_aura},
          {"dense d128 f32", dense, fill_aura},
          {"bf16 d128 hadamard 1Mi rows", large, fill_aura, "", Preference::exact, true}};
}

void aura_rotate_aim(const AuraDesc& d, const AuraRotate::Args& a, Rng& rng) {
  aim_rows(a.x, rng);
  if (a.table) fill_aura(d, "table", a.table, rng);
}

}  // namespace bittern::oracle
