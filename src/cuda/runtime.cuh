// Host side of the plug-in: CUDA errors as values, the current device left as it was found.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "bittern/device.h"
#include "bittern/status.h"
#include "plan/kernel.h"

namespace bittern::cuda {

inline Status status_of(cudaError_t error, std::string_view what) {
  if (error == cudaSuccess) return {};
  (void)cudaGetLastError();  // reported here; not again by the caller's next check
  return {error == cudaErrorMemoryAllocation ? Code::out_of_memory : Code::device_error,
          std::string(what)
              .append(": ")
              .append(cudaGetErrorName(error))
              .append(": ")
              .append(cudaGetErrorString(error))};
}

// Makes `device` current for a scope.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    error_ = cudaGetDevice(&before_);
    if (error_ == cudaSuccess && before_ != device) {
      error_ = cudaSetDevice(device);
      changed_ = error_ == cudaSuccess;
    }
  }
  ~DeviceScope() {
    if (changed_) (void)cudaSetDevice(before_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  cudaError_t error() const { return error_; }

 private:
  int before_ = 0;
  bool changed_ = false;
  cudaError_t error_;
};

// "sm_90": the device itself, whichever of the plug-in's images it runs.
std::string_view architecture(Device device);

// The row of an op's one kernel, which meets the op's contract.
template <class Op>
constexpr Kernel<Op> exact_kernel(decltype(Kernel<Op>::run) run,
                                  decltype(Kernel<Op>::workspace) workspace = nullptr,
                                  decltype(Kernel<Op>::supports) supports = nullptr) {
  return {.name = "cuda",
          .backend = "cuda",
          .supports = supports,
          .workspace = workspace,
          .architecture = architecture,
          .run = run};
}

// What a kernel with other bits than the contract's promises: `bound` of the sum of magnitudes that
// the op's header defines.
inline PrecisionGuarantee within_terms(PrecisionGuarantee contract, double bound) {
  contract.same_bits_on_all_backends = false;
  contract.error_norm = ErrorNorm::terms;
  contract.error_bound = bound;
  return contract;
}

inline constexpr int kBlock = 256;

// As CudaPlugin::time.
Status time(int device, Stream stream, const std::function<Status()>& work, double* seconds);

// The shape of a launch. Kernels loop where a grid cannot hold every block.
struct Grid {
  std::int64_t blocks = 1;
  int threads = kBlock;
  std::size_t shared = 0;  // bytes of dynamic_shared()
  // The kernel calls wait_for_last_kernel() before it touches memory, so its blocks may be there
  // before the last kernel on the stream has ended (sm_90).
  bool waits = false;
  // So many neighbouring blocks run near each other, since they read the same data (sm_90). It must
  // divide `blocks`.
  int cluster = 1;
};

// Enough blocks of `threads` threads for `items`, one each.
inline Grid grid_for(std::int64_t items, int threads = kBlock) {
  return {.blocks = (items + threads - 1) / threads, .threads = threads};
}

// kernel<<<grid>>>(arguments...) on the caller's stream, with this launch's own error.
template <class... Parameters, class... Arguments>
Status launch(std::string_view op, void (*kernel)(Parameters...), const Grid& grid, int device,
              Stream stream, const Arguments&... arguments) {
  const DeviceScope scope(device);
  if (scope.error() != cudaSuccess) return status_of(scope.error(), op);
  if (grid.blocks <= 0) return {};
  constexpr std::int64_t kMostBlocks = 0x7fffffff;
  constexpr std::size_t kAlwaysGranted = 48 << 10;
  if (grid.shared > kAlwaysGranted) {
    const cudaError_t error = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(grid.shared));
    if (error != cudaSuccess) return status_of(error, op);
  }
  cudaLaunchConfig_t config{};
  config.gridDim =
      dim3(static_cast<unsigned>(grid.blocks < kMostBlocks ? grid.blocks : kMostBlocks));
  config.blockDim = dim3(static_cast<unsigned>(grid.threads));
  config.dynamicSmemBytes = grid.shared;
  config.stream = static_cast<cudaStream_t>(stream.native);
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  if (grid.waits) {
    cudaLaunchAttribute& early = attributes[config.numAttrs++];
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
  }
  if (grid.cluster > 1) {
    cudaLaunchAttribute& near = attributes[config.numAttrs++];
    near.id = cudaLaunchAttributeClusterDimension;
    near.val.clusterDim = {static_cast<unsigned>(grid.cluster), 1, 1};
  }
  return status_of(cudaLaunchKernelEx(&config, kernel, arguments...), op);
}

// What a kernel may count on.
struct Limits {
  int multiprocessors = 0;
  int capability = 0;  // 90 for compute capability 9.0
  std::size_t shared_per_block = 0;
};
const Limits& limits(int device);

// Why kernels may not use products of a warpgroup: sm_90a's code runs on 9.0 alone, and must have
// been compiled.
Status needs_warpgroups(Device device);

// Why a kernel may not use `bytes` of shared memory in a block.
Status needs_shared(Device device, std::size_t bytes);

// For Kernel::accepts, of kernels that copy several bytes at a time. Refuses an operand whose
// address is not a multiple of `bytes`.
Status starts_aligned(const char* operand, const void* data, std::size_t bytes = 16);
// The same of each of its rows.
Status rows_aligned(const char* operand, const ConstView& view, std::size_t bytes = 16);

}  // namespace bittern::cuda
