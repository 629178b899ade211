#include "cuda/gemm.cuh"

#include <dlfcn.h>

#include <string>

#include "cuda/runtime.cuh"

namespace bittern::cuda {
namespace {

// The few names needed of cublas_v2.h, whose ABI they are: found at run time, so that the plug-in
// needs no cuBLAS to be built or to run.
struct Cublas {
  int (*create)(void** handle) = nullptr;
  int (*destroy)(void* handle) = nullptr;
  int (*gemm)(void* handle, int trans_a, int trans_b, int m, int n, int k, const void* alpha,
              const void* a, int a_type, int lda, const void* b, int b_type, int ldb,
              const void* beta, void* c, int c_type, int ldc, int compute_type,
              int algorithm) = nullptr;
};
constexpr int kNoTranspose = 0;        // CUBLAS_OP_N
constexpr int kBf16 = 14;              // CUDA_R_16BF
constexpr int kComputeF32 = 68;        // CUBLAS_COMPUTE_32F
constexpr int kDefaultAlgorithm = -1;  // CUBLAS_GEMM_DEFAULT

Result<Cublas> find() {
  void* library = nullptr;
  for (const char* name : {"libcublas.so.13", "libcublas.so.12", "libcublas.so"})
    if (library == nullptr) library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return unavailable("cuda: no libcublas.so, which the GEMM rate needs");
  Cublas found;
  const auto look_up = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    return function != nullptr;
  };
  if (!look_up(found.create, "cublasCreate_v2") || !look_up(found.destroy, "cublasDestroy_v2") ||
      !look_up(found.gemm, "cublasGemmEx")) {
    return unavailable("cuda: libcublas.so lacks cublasGemmEx");
  }
  return found;
}

Status status_of_cublas(int code) {
  if (code == 0) return {};
  return {Code::device_error, "cuda: cuBLAS error " + std::to_string(code)};
}

}  // namespace

Status gemm_bf16(int device, int n, const void* a, const void* b, void* c, double* seconds) {
  static const auto* const cublas = new Result<Cublas>(find());
  if (!*cublas) return cublas->status();
  const DeviceScope scope(device);
  if (scope.error() != cudaSuccess) return status_of(scope.error(), "cuda: gemm");
  void* handle = nullptr;
  if (const int code = (*cublas)->create(&handle); code != 0)
    return unavailable("cuda: cuBLAS does not start, error " + std::to_string(code));
  const auto product = [&] {
    const float one = 1, zero = 0;
    return status_of_cublas((*cublas)->gemm(handle, kNoTranspose, kNoTranspose, n, n, n, &one, a,
                                            kBf16, n, b, kBf16, n, &zero, c, kBf16, n, kComputeF32,
                                            kDefaultAlgorithm));
  };
  Status status = product();  // chooses and loads its kernel
  if (status.ok()) status = time(device, Stream(), product, seconds);
  (void)(*cublas)->destroy(handle);
  return status;
}

}  // namespace bittern::cuda
