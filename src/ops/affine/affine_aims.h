#pragma once
#include "oracle/aim.h"

namespace bittern::oracle {

// The same for the affine ops: groups of 2 3 5 32 48 64 80 96 128 1000 1024, bits and bins,
// storages.
std::vector<AffineDesc> affine_cases();

// For pack_codes and unpack_codes: every width, rows with every kind of tail, and one problem of
// `large_bits` that is large enough for streaming stores; and what to measure.
std::vector<PackDesc> pack_cases(std::int32_t large_bits);
std::vector<BenchCase<PackDesc>> pack_bench_cases();

}  // namespace bittern::oracle
