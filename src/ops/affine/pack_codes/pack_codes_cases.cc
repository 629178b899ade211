#include "ops/affine/affine_aims.h"

namespace bittern::oracle {

std::vector<PackDesc> pack_codes_check_cases() { return pack_cases(8); }

std::vector<BenchCase<PackDesc>> pack_codes_bench_cases() { return pack_bench_cases(); }

// Random bytes already hold codes beyond every width.
void pack_codes_aim(const PackDesc&, const PackCodes::Args&, Rng&) {}

}  // namespace bittern::oracle
