#pragma once
#include "oracle/aim.h"

namespace bittern::oracle {

// About half of x within 2 ulp of a rounding tie (k + 1/2) * s or of a clamp, the rest as it was.
void aim_quotient(const QuantizeDesc& d, const ConstView& x, const ConstView& scale,
                  const ConstView& zero_point, Rng& rng);

// Geometries (group, token, channel, tensor; sizes with every kind of tail) x elements x codes.
// Fields a case does not set stay as in `base`.
std::vector<QuantizeDesc> quantize_cases(const QuantizeFields& fields);

// The same for ops that sum over a parameter's elements, with lengths around blocks of partial
// sums, columns in several units, and parameters without elements; and what to measure.
std::vector<QuantizeDesc> sum_cases(const QuantizeFields& fields);
std::vector<BenchCase<QuantizeDesc>> sum_bench_cases();

// For the elementwise ops that store no code: the same and ranges of any 32-bit kind, and what to
// measure.
std::vector<QuantizeDesc> codeless_cases(const QuantizeFields& fields);

std::vector<BenchCase<QuantizeDesc>> codeless_bench_cases();

// Each case once more at a GPU's size.
std::vector<BenchCase<QuantizeDesc>> with_large_cases(std::vector<BenchCase<QuantizeDesc>> cases);

}  // namespace bittern::oracle
