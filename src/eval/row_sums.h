// Sums over the vocabulary, of rows of log probabilities. Terms are added in f64 in 16 chains, term
// i in chain i % 16, which are then folded in half until one is left: the same bits everywhere.
#pragma once
#include <cstdint>

namespace bittern {

// Sum of exp(p) (p - q), products and differences in f64: KL(p || q).
double kl_of_row(const float* p, const float* q, std::int64_t count);
// Sum of exp(p).
double mass_of_row(const float* p, std::int64_t count);

// For tests: the same without SIMD.
double kl_of_row_ref(const float* p, const float* q, std::int64_t count);
double mass_of_row_ref(const float* p, std::int64_t count);

}  // namespace bittern
