#include "emulation.h"

#include <sys/mman.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "bittern/dtype.h"
#include "cuda_runtime.h"

// ---- fibres ----

// Leaves the present stack, its place noted in *from, for the one noted in `to`.
extern "C" void bittern_switch_stack(void** from, void* to);
asm(R"(
.text
.globl bittern_switch_stack
.type bittern_switch_stack, @function
bittern_switch_stack:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.size bittern_switch_stack, .-bittern_switch_stack
)");

namespace emulation {
namespace {

constexpr std::size_t kStack = 256 << 10;
constexpr std::size_t kMostShared = 228 << 10;
constexpr int kMostThreads = 1024;

struct Fibre {
  void* stack_pointer = nullptr;
  std::unique_ptr<std::byte[]> stack;
  bool done = false;
};

// Where the lanes of one mask meet. Two sets of slots: a lane cannot come to the meeting after next
// before every other has read what this one left.
struct Meeting {
  unsigned arrived = 0;
  unsigned generation = 0;
  Slot slots[2][32];
};

struct Warp {
  unsigned alive = 0;
  std::map<unsigned, Meeting> meetings;
};

// One of the barriers of some of a block's threads.
struct NamedBarrier {
  int arrived = 0;
  unsigned generation = 0;
};
constexpr int kNamedBarriers = 16;

struct Block {
  int threads = 0, alive = 0, present = 0;
  int waiting = 0, counted = 0, count = 0;  // at the block's barrier
  unsigned generation = 0;
  std::uint64_t steps = 0;  // what has moved on; none in a whole round: nobody ever will
  std::vector<Warp> warps;
  NamedBarrier barriers[kNamedBarriers];
  const std::function<void()>* body = nullptr;
  dim3 shape;
};

std::mutex running;
std::vector<Fibre> fibres;
void* scheduler = nullptr;
Block block;
alignas(1024) std::byte shared_memory[kMostShared];

void resume(int thread) {
  block.present = thread;
  const auto t = static_cast<unsigned>(thread);
  threadIdx = {t % block.shape.x, t / block.shape.x % block.shape.y,
               t / block.shape.x / block.shape.y};
  bittern_switch_stack(&scheduler, fibres[t].stack_pointer);
}

void yield() {
  const int thread = block.present;
  bittern_switch_stack(&fibres[static_cast<std::size_t>(thread)].stack_pointer, scheduler);
}

void open_barrier_if_full() {
  if (block.waiting == 0 || block.waiting < block.alive) return;
  block.count = block.counted;
  block.waiting = block.counted = 0;
  ++block.generation;
  ++block.steps;
}

void open_meeting_if_full(Warp& warp, unsigned mask) {
  Meeting& meeting = warp.meetings[mask];
  if (meeting.arrived == 0 || (meeting.arrived & warp.alive) != (mask & warp.alive)) return;
  meeting.arrived = 0;
  ++meeting.generation;
  ++block.steps;
}

void fibre_main() {
  (*block.body)();
  const int thread = block.present;
  fibres[static_cast<std::size_t>(thread)].done = true;
  --block.alive;
  ++block.steps;
  Warp& warp = block.warps[static_cast<std::size_t>(thread / 32)];
  warp.alive &= ~(1u << thread % 32);
  open_barrier_if_full();
  for (auto& [mask, meeting] : warp.meetings) open_meeting_if_full(warp, mask);
  yield();
  std::abort();  // not resumed
}

void prepare(Fibre& fibre) {
  if (!fibre.stack) fibre.stack = std::make_unique<std::byte[]>(kStack);
  fibre.done = false;
  auto top = reinterpret_cast<std::uintptr_t>(fibre.stack.get() + kStack) & ~std::uintptr_t{15};
  auto* const words = reinterpret_cast<void**>(top);
  words[-1] = nullptr;  // no caller
  words[-2] = reinterpret_cast<void*>(&fibre_main);
  std::fill(words - 8, words - 2, nullptr);  // the registers
  fibre.stack_pointer = words - 8;
}

void run_block(bool reversed) {
  block.alive = block.threads;
  block.waiting = block.counted = 0;
  block.warps.assign(static_cast<std::size_t>((block.threads + 31) / 32), {});
  std::fill_n(block.barriers, kNamedBarriers, NamedBarrier());
  for (int i = 0; i < block.threads; ++i) {
    prepare(fibres[static_cast<std::size_t>(i)]);
    block.warps[static_cast<std::size_t>(i / 32)].alive |= 1u << i % 32;
  }
  while (block.alive > 0) {
    const std::uint64_t before = block.steps;
    for (int i = 0; i < block.threads; ++i) {
      const int thread = reversed ? block.threads - 1 - i : i;
      if (!fibres[static_cast<std::size_t>(thread)].done) resume(thread);
    }
    if (block.steps == before) {
      std::fprintf(stderr, "emulated CUDA: block %u: %d threads wait for one another for ever\n",
                   blockIdx.x, block.alive);
      std::abort();
    }
  }
}

}  // namespace

void run_grid(dim3 grid, dim3 shape, std::size_t shared_bytes, const std::function<void()>& body) {
  const std::lock_guard lock(running);
  block.shape = shape;
  block.threads = static_cast<int>(shape.x * shape.y * shape.z);
  block.body = &body;
  fibres.resize(std::max(fibres.size(), static_cast<std::size_t>(block.threads)));
  blockDim = shape;
  gridDim = grid;
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        blockIdx = {x, y, z};
        std::memset(shared_memory, 0xA5, shared_bytes);
        // Both orders, so that a forgotten barrier is seen by one of them.
        run_block((x + y + z) % 2 == 1);
      }
    }
  }
}

void* dynamic_shared() { return shared_memory; }
int lane() { return block.present % 32; }

int block_count(int predicate) {
  block.counted += predicate != 0;
  ++block.waiting;
  const unsigned generation = block.generation;
  open_barrier_if_full();
  while (block.generation == generation) yield();
  return block.count;
}
void block_barrier() { (void)block_count(0); }

void named_barrier(int barrier, int threads, bool wait) {
  if (barrier < 1 || barrier >= kNamedBarriers || threads % 32 != 0) {
    std::fprintf(stderr, "emulated CUDA: no barrier %d of %d threads\n", barrier, threads);
    std::abort();
  }
  NamedBarrier& b = block.barriers[barrier];
  const unsigned generation = b.generation;
  if (++b.arrived == threads) {
    b.arrived = 0;
    ++b.generation;
    ++block.steps;
  }
  while (wait && b.generation == generation) yield();
}

const Slot* exchange(unsigned mask, const void* data, std::size_t bytes) {
  Warp& warp = block.warps[static_cast<std::size_t>(block.present / 32)];
  if ((mask >> lane() & 1) == 0) {
    std::fprintf(stderr, "emulated CUDA: lane %d is not in its own mask %x\n", lane(), mask);
    std::abort();
  }
  Meeting& meeting = warp.meetings[mask];
  const unsigned generation = meeting.generation;
  Slot* slots = meeting.slots[generation % 2];
  std::memcpy(slots[lane()].bytes, data, bytes);
  meeting.arrived |= 1u << lane();
  open_meeting_if_full(warp, mask);
  while (meeting.generation == generation) yield();
  return slots;
}

float half_to_float(std::uint16_t bits) { return bittern::to_f32(bittern::f16{bits}); }
std::uint16_t float_to_half(float x) { return bittern::to_f16(x).bits; }
std::uint16_t float_to_bfloat(float x) { return bittern::to_bf16(x).bits; }

}  // namespace emulation

// ---- the runtime ----

struct EmulatedGraph {
  std::vector<std::function<void()>> work;
};
struct EmulatedStream {
  std::unique_ptr<EmulatedGraph> capturing;
};
struct EmulatedEvent {
  std::chrono::steady_clock::time_point at;
};

namespace {

std::mutex memory_mutex;
std::map<const void*, std::size_t> allocations;

// Now, or when the graph that the stream captures is launched.
void submit(cudaStream_t stream, std::function<void()> work) {
  if (stream != nullptr && stream->capturing) {
    stream->capturing->work.push_back(std::move(work));
  } else {
    work();
  }
}

}  // namespace

namespace {
// BITTERN_EMULATED_CAPABILITY=80: another device than that of sm_90.
// BITTERN_EMULATED_MULTIPROCESSORS: more of them than the usual few, with which persistent kernels
// take several rounds.
int property(const char* variable, int usual) {
  const char* text = std::getenv(variable);
  return text != nullptr ? std::atoi(text) : usual;
}
int capability() { return property("BITTERN_EMULATED_CAPABILITY", 90); }
}  // namespace

namespace emulation {
// As devices have it: 227 KiB where bulk copies and warpgroups are, 163 before that. sm_120 is one
// of those with 99.
int shared_per_block() {
  switch (capability()) {
    case 80: return 163 << 10;
    case 120: return 99 << 10;
    default: return 227 << 10;
  }
}
cudaError_t launch(const cudaLaunchConfig_t& config, std::function<void()> body) {
  const dim3 grid = config.gridDim, shape = config.blockDim;
  const std::size_t shared = config.dynamicSmemBytes;
  const auto threads = static_cast<std::uint64_t>(shape.x) * shape.y * shape.z;
  if (threads == 0 || threads > kMostThreads || grid.x == 0 || grid.x > 0x7fffffff ||
      grid.y > 65535 || grid.z > 65535 || shared > static_cast<std::size_t>(shared_per_block())) {
    return cudaErrorInvalidConfiguration;
  }
  submit(config.stream, [=] { run_grid(grid, shape, shared, body); });
  return cudaSuccess;
}
}  // namespace emulation

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
  }
  return "unknown";
}
const char* cudaGetErrorString(cudaError_t) { return "emulated"; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidDevice; }
cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  switch (which) {
    case cudaDevAttrComputeCapabilityMajor: *value = capability() / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = capability() % 10; break;
    case cudaDevAttrMultiProcessorCount:
      *value = property("BITTERN_EMULATED_MULTIPROCESSORS", 3);
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = emulation::shared_per_block(); break;
  }
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* out, int device) {
  *out = {"emulated", 0, 1 << 20};
  return cudaDeviceGetAttribute(&out->multiProcessorCount, cudaDevAttrMultiProcessorCount, device);
}
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
namespace {
// Memory lies at the end of its pages, between pages that cannot be touched: what a kernel reads or
// writes far outside is a fault, as it may be on a device.
struct Guarded {
  static constexpr std::size_t kPage = 4096, kGuard = 16 << 20;
  std::size_t used, pages;
  explicit Guarded(std::size_t bytes)
      : used((bytes + 255) / 256 * 256), pages((used + kPage - 1) / kPage * kPage) {}
  void* allocate() const {
    void* const all = mmap(nullptr, pages + 2 * kGuard, PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED) return nullptr;
    auto* const first = static_cast<std::byte*>(all) + kGuard;
    if (mprotect(first, pages, PROT_READ | PROT_WRITE) != 0) {
      munmap(all, pages + 2 * kGuard);
      return nullptr;
    }
    return first + (pages - used);
  }
  void release(void* p) const {
    munmap(static_cast<std::byte*>(p) - (pages - used) - kGuard, pages + 2 * kGuard);
  }
};
}  // namespace
cudaError_t cudaMalloc(void** out, std::size_t bytes) {
  *out = bytes > std::size_t{1} << 33 ? nullptr : Guarded(bytes).allocate();
  if (*out == nullptr) return cudaErrorMemoryAllocation;
  const std::lock_guard lock(memory_mutex);
  allocations[*out] = bytes;
  return cudaSuccess;
}
cudaError_t cudaFree(void* p) {
  const std::lock_guard lock(memory_mutex);
  if (const auto found = allocations.find(p); found != allocations.end()) {
    Guarded(found->second).release(p);
    allocations.erase(found);
  }
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  submit(stream, [=] { std::memcpy(to, from, bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  submit(stream, [=] { std::memset(to, value, bytes); });
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* p) {
  const std::lock_guard lock(memory_mutex);
  const auto after = allocations.upper_bound(p);
  *out = {cudaMemoryTypeUnregistered, 0, nullptr, nullptr};
  if (after == allocations.begin()) return cudaSuccess;
  const auto& [start, bytes] = *std::prev(after);
  if (static_cast<const std::byte*>(p) < static_cast<const std::byte*>(start) + bytes)
    *out = {cudaMemoryTypeDevice, 0, const_cast<void*>(p), nullptr};
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned) {
  *out = new EmulatedStream();
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  if (stream == nullptr) return cudaErrorInvalidValue;
  stream->capturing = std::make_unique<EmulatedGraph>();
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* out) {
  *out = stream->capturing.release();
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* out, cudaGraph_t graph, unsigned long long) {
  *out = new EmulatedGraph(*graph);
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t) {
  for (const auto& work : graph->work) work();
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* out) {
  *out = new EmulatedEvent();
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  event->at = std::chrono::steady_clock::now();
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  *milliseconds = std::chrono::duration<float, std::milli>(end->at - start->at).count();
  return cudaSuccess;
}
