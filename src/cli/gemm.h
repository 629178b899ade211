// Matrix products on the CPU, by oneDNN; unsupported in a build without it.
#pragma once
#include <cstdint>

#include "bittern/dtype.h"
#include "bittern/status.h"

namespace bittern::cpu {

// c[m,n] = a[m,k] * b[k,n]; dense, row-major, f32 sums in oneDNN's order. Uses num_threads()
// threads and no wider SIMD than isa().
Status gemm_f32(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, const float* b,
                float* c);

// The same of bf16, with f32 sums. Unsupported where the CPU multiplies no bf16.
Status gemm_bf16(std::int64_t m, std::int64_t n, std::int64_t k, const bf16* a, const bf16* b,
                 bf16* c);

}  // namespace bittern::cpu
