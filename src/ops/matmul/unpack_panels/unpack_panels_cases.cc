#include "ops/matmul/matmul_aims.h"

namespace bittern::oracle {

std::vector<WeightDesc> unpack_panels_check_cases() {
  std::vector<WeightDesc> cases = weight_cases();
  cases.push_back({.outputs = 70, .inputs = 4096});
  return cases;
}

std::vector<BenchCase<WeightDesc>> unpack_panels_bench_cases() {
  const WeightDesc affine{.outputs = 16384, .inputs = 4096};
  WeightDesc q4_k = affine;
  q4_k.type = WeightType::q4_k;
  return {{"affine 4 bit group 64", affine}, {"Q4_K", q4_k}};
}

// Random bytes hold every code and every header.
void unpack_panels_aim(const WeightDesc&, const UnpackPanels::Args&, Rng&) {}

}  // namespace bittern::oracle
