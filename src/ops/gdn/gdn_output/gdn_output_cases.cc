#include "ops/gdn/gdn_aims.h"

namespace bittern::oracle {

std::vector<GdnDesc> gdn_output_check_cases() { return gdn_cases(GdnOutput::kFields); }

std::vector<BenchCase<GdnDesc>> gdn_output_bench_cases() { return gdn_bench_cases(); }

void gdn_output_aim(const GdnDesc& d, const GdnOutput::Args& a, Rng& rng) {
  aim_sequences(d.rows(), a.cu_seqlens, rng);
  for (const ConstView& x : {a.q, a.k, a.v_new, a.h}) aim_values(x, 0.3, rng);
  aim_log_decay(a.g, rng);
}

}  // namespace bittern::oracle
