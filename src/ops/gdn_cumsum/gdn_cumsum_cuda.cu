#include "bittern/ops/gdn_cumsum.h"
#include "core/gdn.h"
#include "cuda/gdn.cuh"
#include "cuda/runtime.cuh"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = GdnCumsum;

constexpr int kThreads = 128;
constexpr int kAhead = 16;  // loads under way, per thread

struct Problem {
  cuda::ChunkSlots slots;
  const float *g, *a_log, *dt_bias;
  float* sum;
  cuda::Divisor heads;
  std::int64_t items;  // slots x heads
};

// A thread has one chunk and head, its neighbours the next heads: the order of the additions is the
// definition's, and rows are read and written side by side.
template <bool kGate>
__global__ void __launch_bounds__(kThreads) cumsum(const Problem p) {
  const std::int64_t heads = p.heads.value();
  for (std::int64_t item = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; item < p.items;
       item += std::int64_t{gridDim.x} * kThreads) {
    const std::int64_t slot = p.heads.divide(item), head = item - slot * heads;
    const cuda::ChunkTokens chunk = p.slots.at(slot);
    const float* g = p.g + chunk.begin * heads + head;
    float* out = p.sum + chunk.begin * heads + head;
    float a_log = 0, dt_bias = 0;
    if constexpr (kGate) {
      a_log = p.a_log[head];
      dt_bias = p.dt_bias[head];
    }
    float sum = 0;
    for (int first = 0; first < chunk.rows; first += kAhead) {
      float ahead[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        if (first + i < chunk.rows) ahead[i] = g[(first + i) * heads];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (first + i >= chunk.rows) break;
        sum += kGate ? gdn_log_decay(ahead[i], a_log, dt_bias) : ahead[i];
        out[(first + i) * heads] = sum;
      }
    }
  }
}

Status run(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace) {
  Problem p{.slots = cuda::ChunkSlots(d, a.cu_seqlens),
            .g = a.g.as<float>(),
            .a_log = a.a_log.as<float>(),
            .dt_bias = a.dt_bias.as<float>(),
            .sum = a.sum.as<float>(),
            .heads = cuda::Divisor(d.value_heads),
            .items = 0};
  p.items = p.slots.count * d.value_heads;
  return cuda::launch(Op::kName, d.gate ? cumsum<true> : cumsum<false>,
                      cuda::grid_for(p.items, kThreads), a.sum.device.index, stream, p);
}

constexpr Kernel<Op> kKernels[] = {
    {.name = "cuda", .backend = "cuda", .architecture = cuda::architecture, .run = run}};

}  // namespace

std::span<const Kernel<GdnCumsum>> gdn_cumsum_cuda() { return kKernels; }

}  // namespace bittern
