// Marks arithmetic that CUDA kernels share with the CPU. Empty where no device is compiled for.
#pragma once
#ifdef __CUDACC__
#define BITTERN_HOST_DEVICE __host__ __device__
#else
#define BITTERN_HOST_DEVICE
#endif
