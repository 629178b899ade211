#include "ops/affine/affine_aims.h"

namespace bittern::oracle {

std::vector<PackDesc> unpack_codes_check_cases() { return pack_cases(3); }

std::vector<BenchCase<PackDesc>> unpack_codes_bench_cases() { return pack_bench_cases(); }

// Random words already hold every code at every place, and spare bits that are not zero.
void unpack_codes_aim(const PackDesc&, const UnpackCodes::Args&, Rng&) {}

}  // namespace bittern::oracle
