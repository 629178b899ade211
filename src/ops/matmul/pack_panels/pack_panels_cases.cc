#include "ops/matmul/matmul_aims.h"

namespace bittern::oracle {

std::vector<WeightDesc> pack_panels_check_cases() {
  std::vector<WeightDesc> cases = weight_cases();
  cases.push_back({.outputs = 70, .inputs = 4096});
  return cases;
}

std::vector<BenchCase<WeightDesc>> pack_panels_bench_cases() {
  const WeightDesc affine{.outputs = 16384, .inputs = 4096};
  WeightDesc q4_1 = affine, q4_k = affine, q8_0 = affine, bf16 = affine;
  q4_1.type = WeightType::q4_1;
  q4_k.type = WeightType::q4_k;
  q8_0.type = WeightType::q8_0;
  bf16.type = WeightType::bf16;
  return {{"affine 4 bit group 64", affine},
          {"Q4_1", q4_1},
          {"Q4_K", q4_k},
          {"Q8_0", q8_0},
          {"bf16", bf16}};
}

// Random bytes hold every code and every header.
void pack_panels_aim(const WeightDesc&, const PackPanels::Args&, Rng&) {}

}  // namespace bittern::oracle
