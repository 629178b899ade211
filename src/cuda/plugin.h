// The whole interface between the core and libbittern_cuda.so. Both are built from one tree; `abi`
// guards against a stale file.
#pragma once
#include <cstdint>
#include <functional>
#include <string>

#include "plan/kernels.h"

namespace bittern {

// What benchmarks say of a device, and size their problems by.
struct CudaDeviceInfo {
  std::string name;
  int multiprocessors = 0;
  std::size_t l2_bytes = 0;
};

struct CudaPlugin {
  std::uint64_t abi;
  // The number of devices; 0 and a reason when there is none.
  int (*device_count)(const char** why);
  Status (*alloc)(int device, std::size_t bytes, void** out);
  void (*release)(int device, void* p);
  Status (*copy)(void* dst, const void* src, std::size_t bytes);  // any direction
  Status (*synchronize)(int device);
  // Whether kernels on `device` can use the memory at `p`; why not, if they cannot.
  Status (*check_pointer)(int device, const void* p);
  Status (*info)(int device, CudaDeviceInfo* out);
  Status (*make_stream)(int device, Stream* out);
  void (*end_stream)(int device, Stream stream);
  // Seconds that what `work` puts on the stream takes there, from event to event.
  Status (*time)(int device, Stream stream, const std::function<Status()>& work, double* seconds);
  // The same, captured as a graph and replayed: the mean of `replays`.
  Status (*replay)(int device, Stream stream, const std::function<Status()>& work, int replays,
                   double* seconds);
  // Put a copy within the device's memory on the stream: the runtime's own, and a plain kernel that
  // moves 16 bytes per access (`bytes` is a multiple of 16, both ends are aligned).
  Status (*stream_copy)(int device, Stream stream, void* dst, const void* src, std::size_t bytes);
  Status (*kernel_copy)(int device, Stream stream, void* dst, const void* src, std::size_t bytes);
  // Seconds of c = a b, bf16 with f32 sums, all [n, n], by cuBLAS; unavailable without it.
  Status (*gemm_bf16)(int device, int n, const void* a, const void* b, void* c, double* seconds);
#define BITTERN_OP(T, f, CPU, CUDA) BITTERN_IF_##CUDA(std::span<const Kernel<T>> f;)
#include "ops/ops.inc"
};

// Changes with the layout of anything that crosses the boundary; the leading number, with meaning.
inline constexpr std::uint64_t kCudaPluginAbi = (std::uint64_t{2} << 32) + sizeof(CudaPlugin)
#define BITTERN_OP(T, f, CPU, CUDA) +31 * sizeof(T::Desc) + 17 * sizeof(T::Args) + sizeof(Kernel<T>)
#include "ops/ops.inc"
    ;

inline constexpr const char* kCudaPluginEntry = "bittern_cuda_plugin";
using CudaPluginEntry = const CudaPlugin* (*)();

// The plug-in, loaded once, when it has a device of this index. Otherwise `unavailable`: no file,
// not a plug-in, another build, no driver, no such device.
Result<const CudaPlugin*> cuda_plugin(int device_index);

// The same for one given file.
Result<const CudaPlugin*> load_cuda_plugin(const std::string& path, int device_index);

// The file cuda_plugin() loads: BITTERN_CUDA_PLUGIN if set, else the first of libbittern_cuda.so
// beside the program or library that holds bittern, in bittern/ below that, in the library
// directory next to it, and where it was to be installed. Never the current directory.
Result<std::string> cuda_plugin_path();

}  // namespace bittern
