// The whole interface between the core and libbittern_cuda.so. Both are built from one tree; `abi`
// guards against a stale file.
#pragma once
#include <cstdint>
#include <string>

#include "plan/kernels.h"

namespace bittern {

struct CudaPlugin {
  std::uint64_t abi;
  // The number of devices; 0 and a reason when there is none.
  int (*device_count)(const char** why);
  Status (*alloc)(int device, std::size_t bytes, void** out);
  void (*release)(int device, void* p);
  Status (*copy)(void* dst, const void* src, std::size_t bytes);  // any direction
  Status (*synchronize)(int device);
#define BITTERN_OP(T, f, CPU, CUDA) BITTERN_IF_##CUDA(std::span<const Kernel<T>> f;)
#include "ops/ops.inc"
};

// Changes with the layout of anything that crosses the boundary; the leading number, with meaning.
inline constexpr std::uint64_t kCudaPluginAbi = (std::uint64_t{1} << 32) + sizeof(CudaPlugin)
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
