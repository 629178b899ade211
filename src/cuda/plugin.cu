// libbittern_cuda.so: device memory, and every op with a CUDA kernel.
#include "cuda/plugin.h"

#include <vector>

#include "cuda/runtime.cuh"

namespace bittern {
namespace cuda {
namespace {

int device_count(const char** why) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess) return count;
  (void)cudaGetLastError();
  int driver = 0;  // stays 0 when libcuda.so.1 is not there
  (void)cudaDriverGetVersion(&driver);
  *why = driver == 0 ? "no NVIDIA driver (libcuda.so.1)" : cudaGetErrorString(error);
  return 0;
}

Status alloc(int device, std::size_t bytes, void** out) {
  const DeviceScope scope(device);
  if (scope.error() != cudaSuccess) return status_of(scope.error(), "cuda: alloc");
  return status_of(cudaMalloc(out, bytes), "cuda: alloc");
}

void release(int device, void* p) {
  const DeviceScope scope(device);
  (void)cudaFree(p);
}

// Unified addressing tells where each pointer lives.
Status copy(void* dst, const void* src, std::size_t bytes) {
  return status_of(cudaMemcpy(dst, src, bytes, cudaMemcpyDefault), "cuda: copy");
}

Status synchronize(int device) {
  const DeviceScope scope(device);
  if (scope.error() != cudaSuccess) return status_of(scope.error(), "cuda: synchronize");
  return status_of(cudaDeviceSynchronize(), "cuda: synchronize");
}

std::vector<std::string> architectures() {
  std::vector<std::string> names;
  const char* why = nullptr;
  for (int device = 0, count = device_count(&why); device < count; ++device) {
    int major = 0, minor = 0;
    (void)cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    (void)cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    names.push_back("sm_" + std::to_string(major * 10 + minor));
  }
  return names;
}

}  // namespace

std::string_view architecture(Device device) {
  static const auto* const names = new std::vector<std::string>(architectures());
  const auto index = static_cast<std::size_t>(device.index);
  return index < names->size() ? std::string_view((*names)[index]) : "sm";
}

}  // namespace cuda
}  // namespace bittern

extern "C" __attribute__((visibility("default"))) const bittern::CudaPlugin* bittern_cuda_plugin() {
  using namespace bittern;
  static const CudaPlugin plugin = {
      .abi = kCudaPluginAbi,
      .device_count = cuda::device_count,
      .alloc = cuda::alloc,
      .release = cuda::release,
      .copy = cuda::copy,
      .synchronize = cuda::synchronize,
#define BITTERN_OP(T, f, CPU, CUDA) BITTERN_IF_##CUDA(.f = f##_cuda(), )
#include "ops/ops.inc"
  };
  return &plugin;
}
