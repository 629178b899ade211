// The bf16 matrix product that benchmarks are held against: cuBLAS's, where it is installed.
#pragma once
#include "bittern/status.h"

namespace bittern::cuda {

// As CudaPlugin::gemm_bf16.
Status gemm_bf16(int device, int n, const void* a, const void* b, void* c, double* seconds);

}  // namespace bittern::cuda
