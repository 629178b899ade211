// libbittern_cuda.so: device memory, and every op with a CUDA kernel.
#include "cuda/plugin.h"

#include <vector>

#include "cuda/gemm.cuh"
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

Status check_pointer(int device, const void* p) {
  cudaPointerAttributes found{};
  if (const cudaError_t error = cudaPointerGetAttributes(&found, p); error != cudaSuccess)
    return status_of(error, "cuda: pointer");
  const std::string here = "cuda:" + std::to_string(device);
  switch (found.type) {
    case cudaMemoryTypeManaged: return {};
    case cudaMemoryTypeHost:
      // Pinned memory that the device has mapped under the same address.
      if (found.devicePointer == p) return {};
      return invalid("host memory that " + here + " cannot reach, expected device memory");
    case cudaMemoryTypeDevice: break;
    default: return invalid("host memory, expected memory of " + here);
  }
  if (found.device == device) return {};
  return invalid("memory of cuda:" + std::to_string(found.device) + ", expected " + here);
}

Status info(int device, CudaDeviceInfo* out) {
  cudaDeviceProp found{};
  BITTERN_TRY(status_of(cudaGetDeviceProperties(&found, device), "cuda: device"));
  *out = {.name = found.name,
          .multiprocessors = found.multiProcessorCount,
          .l2_bytes = static_cast<std::size_t>(found.l2CacheSize)};
  return {};
}

Status make_stream(int device, Stream* out) {
  const DeviceScope scope(device);
  if (scope.error() != cudaSuccess) return status_of(scope.error(), "cuda: stream");
  cudaStream_t stream = nullptr;
  BITTERN_TRY(status_of(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cuda: stream"));
  out->native = stream;
  return {};
}

void end_stream(int device, Stream stream) {
  const DeviceScope scope(device);
  (void)cudaStreamDestroy(static_cast<cudaStream_t>(stream.native));
}

class Event {
 public:
  Event() { error_ = cudaEventCreate(&event_); }
  ~Event() {
    if (event_ != nullptr) (void)cudaEventDestroy(event_);
  }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  Status record(Stream stream) {
    BITTERN_TRY(status_of(error_, "cuda: event"));
    return status_of(cudaEventRecord(event_, static_cast<cudaStream_t>(stream.native)),
                     "cuda: event");
  }
  Status seconds_since(const Event& start, double* seconds) {
    BITTERN_TRY(status_of(cudaEventSynchronize(event_), "cuda: event"));
    float milliseconds = 0;
    BITTERN_TRY(
        status_of(cudaEventElapsedTime(&milliseconds, start.event_, event_), "cuda: event"));
    *seconds = 1e-3 * static_cast<double>(milliseconds);
    return {};
  }

 private:
  cudaEvent_t event_ = nullptr;
  cudaError_t error_;
};

}  // namespace

Status time(int device, Stream stream, const std::function<Status()>& work, double* seconds) {
  const DeviceScope scope(device);
  if (scope.error() != cudaSuccess) return status_of(scope.error(), "cuda: time");
  Event start, end;
  BITTERN_TRY(start.record(stream));
  BITTERN_TRY(work());
  BITTERN_TRY(end.record(stream));
  return end.seconds_since(start, seconds);
}

namespace {

// What `work` puts on a stream, kept for replaying.
class Graph {
 public:
  ~Graph() {
    if (runnable_ != nullptr) (void)cudaGraphExecDestroy(runnable_);
    if (graph_ != nullptr) (void)cudaGraphDestroy(graph_);
  }
  Status capture(cudaStream_t stream, const std::function<Status()>& work) {
    BITTERN_TRY(status_of(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal),
                          "cuda: capture"));
    const Status worked = work();
    const Status ended = status_of(cudaStreamEndCapture(stream, &graph_), "cuda: capture");
    BITTERN_TRY(worked);
    BITTERN_TRY(ended);
    return status_of(cudaGraphInstantiate(&runnable_, graph_, 0), "cuda: graph");
  }
  Status launch(cudaStream_t stream) {
    return status_of(cudaGraphLaunch(runnable_, stream), "cuda: graph");
  }

 private:
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t runnable_ = nullptr;
};

Status replay(int device, Stream stream, const std::function<Status()>& work, int replays,
              double* seconds) {
  const DeviceScope scope(device);
  if (scope.error() != cudaSuccess) return status_of(scope.error(), "cuda: replay");
  const auto native = static_cast<cudaStream_t>(stream.native);
  Graph graph;
  BITTERN_TRY(graph.capture(native, work));
  BITTERN_TRY(graph.launch(native));
  BITTERN_TRY(time(
      device, stream,
      [&] {
        for (int i = 0; i < replays; ++i) BITTERN_TRY(graph.launch(native));
        return Status();
      },
      seconds));
  *seconds /= replays;
  return {};
}

Status stream_copy(int device, Stream stream, void* dst, const void* src, std::size_t bytes) {
  const DeviceScope scope(device);
  if (scope.error() != cudaSuccess) return status_of(scope.error(), "cuda: copy");
  return status_of(
      cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(stream.native)),
      "cuda: copy");
}

// One pack to a thread: where as much is written as read, more in flight per thread is slower.
__global__ void __launch_bounds__(kBlock)
    copy_packs(uint4* __restrict__ to, const uint4* __restrict__ from, std::int64_t packs) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (i < packs) __stcs(to + i, __ldcs(from + i));
}

Status kernel_copy(int device, Stream stream, void* dst, const void* src, std::size_t bytes) {
  const auto packs = static_cast<std::int64_t>(bytes / sizeof(uint4));
  return launch("cuda: copy", copy_packs, grid_for(packs), device, stream, static_cast<uint4*>(dst),
                static_cast<const uint4*>(src), packs);
}

struct Known {
  std::string architecture;
  Limits limits;
};

const std::vector<Known>& known_devices() {
  static const auto* const all = [] {
    auto* const devices = new std::vector<Known>();
    const char* why = nullptr;
    for (int device = 0, count = device_count(&why); device < count; ++device) {
      const auto attribute = [&](cudaDeviceAttr which) {
        int value = 0;
        (void)cudaDeviceGetAttribute(&value, which, device);
        return value;
      };
      const int capability = attribute(cudaDevAttrComputeCapabilityMajor) * 10 +
                             attribute(cudaDevAttrComputeCapabilityMinor);
      devices->push_back({"sm_" + std::to_string(capability),
                          {.multiprocessors = attribute(cudaDevAttrMultiProcessorCount),
                           .capability = capability,
                           .shared_per_block = static_cast<std::size_t>(
                               attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin))}});
    }
    return devices;
  }();
  return *all;
}

}  // namespace

std::string_view architecture(Device device) {
  const auto index = static_cast<std::size_t>(device.index);
  return index < known_devices().size() ? std::string_view(known_devices()[index].architecture)
                                        : "sm";
}

const Limits& limits(int device) {
  return known_devices()[static_cast<std::size_t>(device)].limits;
}

Status needs_warpgroups(Device device) {
  if (limits(device.index).capability != 90)
    return unsupported("device: " + std::string(architecture(device)) + ", expected sm_90");
#ifdef BITTERN_SM90A
  return {};
#else
  return unsupported("this build has no code for sm_90a");
#endif
}

Status needs_shared(Device device, std::size_t bytes) {
  const std::size_t has = limits(device.index).shared_per_block;
  if (bytes <= has) return {};
  return unsupported("device: " + std::to_string(has) +
                     " bytes of shared memory a block, expected " + std::to_string(bytes));
}

Status starts_aligned(const char* operand, const void* data, std::size_t bytes) {
  const std::uintptr_t off = reinterpret_cast<std::uintptr_t>(data) % bytes;
  if (off == 0) return {};
  const std::string multiple = "a multiple of " + std::to_string(bytes);
  return unsupported(std::string(operand) + ": address is " + std::to_string(off) + " bytes past " +
                     multiple + ", expected " + multiple);
}

Status rows_aligned(const char* operand, const ConstView& view, std::size_t bytes) {
  if (!view) return {};
  BITTERN_TRY(starts_aligned(operand, view.data, bytes));
  const auto each = static_cast<std::int64_t>(bytes / size_of(view.dtype));
  for (int axis = 0; axis + 1 < view.shape.rank; ++axis) {
    if (view.shape[axis] > 1 && view.stride[axis] % each != 0)
      return unsupported(std::string(operand) + ": stride " + std::to_string(view.stride[axis]) +
                         " of axis " + std::to_string(axis) + ", expected a multiple of " +
                         std::to_string(each));
  }
  return {};
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
      .check_pointer = cuda::check_pointer,
      .info = cuda::info,
      .make_stream = cuda::make_stream,
      .end_stream = cuda::end_stream,
      .time = cuda::time,
      .replay = cuda::replay,
      .stream_copy = cuda::stream_copy,
      .kernel_copy = cuda::kernel_copy,
      .gemm_bf16 = cuda::gemm_bf16,
#define BITTERN_OP(T, f, CPU, CUDA) BITTERN_IF_##CUDA(.f = f##_cuda(), )
#include "ops/ops.inc"
  };
  return &plugin;
}
