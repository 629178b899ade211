#include <bit>

#include "bittern/ops/gdn_cumsum.h"
#include "cuda/runtime.cuh"
#include "ops/gdn/gdn.cuh"
#include "ops/gdn/gdn.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = GdnCumsum;

constexpr int kThreads = 256;
constexpr int kMostRows = 64;   // of a chunk
constexpr int kMostHeads = 32;  // of a block

struct Problem {
  cuda::ChunkSlots slots;
  const float *g, *a_log, *dt_bias;
  float* sum;
  std::int64_t heads;
  int shift;            // a block has 2^shift heads
  cuda::Divisor parts;  // blocks of a chunk
  std::int64_t items;

  Problem(const Op::Desc& d, const Op::Args& a)
      : slots(d, a.cu_seqlens),
        g(a.g.as<float>()),
        a_log(a.a_log.as<float>()),
        dt_bias(a.dt_bias.as<float>()),
        sum(a.sum.as<float>()),
        heads(d.value_heads),
        shift(std::bit_width(
                  static_cast<unsigned>(std::min<std::int64_t>(d.value_heads, kMostHeads))) -
              1),
        parts((heads + (std::int64_t{1} << shift) - 1) >> shift),
        items(slots.count * parts.value()) {}
};

// A block has a chunk of some heads. All threads read (and make the log decays of what they read),
// one thread a head adds, in the definition's order, and all write. Neighbours have neighbouring
// heads.
template <bool kGate>
__global__ void __launch_bounds__(kThreads) cumsum(const Problem p) {
  __shared__ float tile[kMostRows][kMostHeads + 1];
  const int head = static_cast<int>(threadIdx.x) & ((1 << p.shift) - 1);
  const int first = static_cast<int>(threadIdx.x) >> p.shift, apart = kThreads >> p.shift;
  for (std::int64_t index = blockIdx.x; index < p.items; index += gridDim.x) {
    const std::int64_t slot = p.parts.divide(index), part = index - slot * p.parts.value();
    const cuda::ChunkTokens chunk = p.slots.at(slot);
    const std::int64_t h = (part << p.shift) + head;
    const std::int64_t at = chunk.begin * p.heads + h;
    if (h < p.heads) {
      float a_log = 0, dt_bias = 0;
      if constexpr (kGate) {
        a_log = p.a_log[h];
        dt_bias = p.dt_bias[h];
      }
#pragma unroll 8
      for (int row = first; row < chunk.rows; row += apart) {
        const float g = p.g[at + row * p.heads];
        tile[row][head] = kGate ? gdn_log_decay(g, a_log, dt_bias) : g;
      }
    }
    __syncthreads();
    if (first == 0 && h < p.heads) {
      float sum = 0;
#pragma unroll 16
      for (int row = 0; row < chunk.rows; ++row) {
        sum += tile[row][head];
        tile[row][head] = sum;
      }
    }
    __syncthreads();
    if (h < p.heads) {
#pragma unroll 8
      for (int row = first; row < chunk.rows; row += apart)
        p.sum[at + row * p.heads] = tile[row][head];
    }
    __syncthreads();
  }
}

Status run(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace) {
  const Problem p(d, a);
  return cuda::launch(Op::kName, d.gate ? cumsum<true> : cumsum<false>,
                      {.blocks = p.items, .threads = kThreads}, a.sum.device.index, stream, p);
}

constexpr Kernel<Op> kKernels[] = {cuda::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<GdnCumsum>> gdn_cumsum_cuda() { return kKernels; }

}  // namespace bittern
