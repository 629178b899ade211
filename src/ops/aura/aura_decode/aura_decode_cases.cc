#include "ops/aura/aura_aims.h"

namespace bittern::oracle {

std::vector<AuraDesc> aura_decode_check_cases() {
  std::vector<AuraDesc> cases;
  for (AuraDesc d : aura_cases()) {
    d.rotated = cases.size() % 3 == 0;
    cases.push_back(d);
  }
  // Large enough for streaming stores.
  cases.push_back({.rows = 2100, .dim = 128, .rotated = true});
  return cases;
}

std::vector<BenchCase<AuraDesc>> aura_decode_bench_cases() {
  AuraDesc d{.rows = 1 << 17, .dim = 128, .element = DType::bf16, .rotated = true};
  AuraDesc f32 = d, eight = d, turned = d, dense = d;
  f32.element = DType::f32;
  eight.bits = 8;
  turned.rotated = false;
  dense.rotated = false;
  dense.rotation = Rotation::dense;
  const auto large = [](AuraDesc small, std::int32_t bits) {
    small.rows = 1 << 20;
    small.bits = bits;
    return small;
  };
  const auto exact = Preference::exact;
  return {{"rotated d128 4 bit bf16", d, fill_aura},
          {"rotated d128 4 bit f32", f32, fill_aura},
          {"rotated d128 8 bit bf16", eight, fill_aura},
          {"hadamard d128 4 bit bf16", turned, fill_aura},
          {"dense d128 4 bit bf16", dense, fill_aura},
          {"bf16 d128 4 bit hadamard 1Mi rows", large(turned, 4), fill_aura, "", exact, true},
          {"bf16 d128 4 bit rotated 1Mi rows", large(d, 4), fill_aura, "", exact, true},
          {"bf16 d128 8 bit hadamard 1Mi rows", large(turned, 8), fill_aura, "", exact, true},
          {"bf16 d128 4 bit dense 1Mi rows", large(dense, 4), fill_aura, "", exact, true}};
}

// Norms keep the NaN, infinities and zeros that fill() gave some.
void aura_decode_aim(const AuraDesc& d, const AuraDecode::Args& a, Rng& rng) {
  if (a.table) fill_aura(d, "table", a.table, rng);
  fill_aura(d, "codebook", a.codebook, rng);
  if (rng.chance(4)) {
    for (std::int64_t i = 0; i < d.levels(); ++i) put(a.codebook, i, rng.normal());
  }
}

}  // namespace bittern::oracle
