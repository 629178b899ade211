#include "ops/gdn/gdn_aims.h"

namespace bittern::oracle {

std::vector<GdnDesc> gdn_kkt_check_cases() { return gdn_cases(GdnKkt::kFields); }

std::vector<BenchCase<GdnDesc>> gdn_kkt_bench_cases() { return gdn_bench_cases(); }

void gdn_kkt_aim(const GdnDesc& d, const GdnKkt::Args& a, Rng& rng) {
  aim_sequences(d.rows(), a.cu_seqlens, rng);
  aim_values(a.k, 0.3, rng);
  aim_beta(a.beta, rng);
  aim_log_decay(a.g, rng);
}

}  // namespace bittern::oracle
