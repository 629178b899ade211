#include "ops/gdn/gdn_aims.h"

namespace bittern::oracle {

std::vector<GdnDesc> gdn_cumsum_check_cases() {
  std::vector<GdnDesc> cases = gdn_cases(GdnCumsum::kFields);
  for (const bool gate : {false, true}) {
    GdnDesc d{.batch = 2, .tokens = 70, .value_heads = 37};
    d.gate = gate;
    cases.push_back(d);
  }
  return cases;
}

std::vector<BenchCase<GdnDesc>> gdn_cumsum_bench_cases() {
  const GdnDesc plain{.tokens = 1 << 18, .value_heads = 32};
  GdnDesc gate = plain;
  gate.gate = true;
  return {{"32 heads", plain}, {"32 heads gate", gate}};
}

void gdn_cumsum_aim(const GdnDesc& d, const GdnCumsum::Args& a, Rng& rng) {
  aim_sequences(d.rows(), a.cu_seqlens, rng);
  if (!d.gate && !rng.chance(4)) aim_log_decay(a.g, rng);
  if (!d.gate) return;
  aim_values(a.g, 8, rng);
  aim_values(a.a_log, 1, rng);
  aim_values(a.dt_bias, 1, rng);
}

}  // namespace bittern::oracle
