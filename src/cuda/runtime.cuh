// Host side of the plug-in: CUDA errors as values, the current device left as it was found.
#pragma once
#include <cuda_runtime.h>

#include <string>
#include <string_view>

#include "bittern/device.h"
#include "bittern/status.h"

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

inline constexpr int kBlock = 256;

// Enough blocks of kBlock threads for `threads`; kernels loop when the grid cannot hold them all.
inline unsigned grid_for(std::int64_t threads) {
  const std::int64_t blocks = (threads + kBlock - 1) / kBlock;
  constexpr std::int64_t kMost = 0x7fffffff;
  return static_cast<unsigned>(blocks < kMost ? blocks : kMost);
}

// kernel<<<grid, kBlock, 0, stream>>>(argument), with this launch's own error.
template <class Argument>
Status launch(std::string_view op, void (*kernel)(Argument), unsigned grid, int device,
              Stream stream, Argument argument) {
  const DeviceScope scope(device);
  if (scope.error() != cudaSuccess) return status_of(scope.error(), op);
  void* arguments[] = {&argument};
  return status_of(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(grid), dim3(kBlock),
                                    arguments, 0, static_cast<cudaStream_t>(stream.native)),
                   op);
}

}  // namespace bittern::cuda
