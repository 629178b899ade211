#include "ops/gdn/gdn_aims.h"

namespace bittern::oracle {

std::vector<GdnDesc> gdn_state_check_cases() { return gdn_cases(GdnState::kFields); }

std::vector<BenchCase<GdnDesc>> gdn_state_bench_cases() { return gdn_bench_cases(); }

void gdn_state_aim(const GdnDesc& d, const GdnState::Args& a, Rng& rng) {
  aim_sequences(d.rows(), a.cu_seqlens, rng);
  for (const ConstView& x : {a.k, a.w, a.u}) aim_values(x, 0.3, rng);
  aim_values(a.initial_state, 1, rng);
  aim_log_decay(a.g, rng);
}

}  // namespace bittern::oracle
