#include "bittern/ops/gdn_cumsum.h"
#include "cuda/runtime.cuh"
#include "cuda/silu.cuh"
#include "ops/gdn/gdn.cuh"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = GdnCumsum;

constexpr int kThreads = 128;
constexpr int kAhead = 8;  // tokens that are under way while as many are added

struct Problem {
  cuda::ChunkSlots slots;
  const float *g, *a_log, *dt_bias;
  float* sum;
  cuda::Divisor heads;
  std::int64_t items;

  Problem(const Op::Desc& d, const Op::Args& a)
      : slots(d, a.cu_seqlens),
        g(a.g.as<float>()),
        a_log(a.a_log.as<float>()),
        dt_bias(a.dt_bias.as<float>()),
        sum(a.sum.as<float>()),
        heads(d.value_heads),
        items(slots.count * d.value_heads) {}
};

// A thread has a head of a chunk, and adds in the definition's order. Neighbours have neighbouring
// heads.
template <bool kGate>
__global__ void __launch_bounds__(kThreads, 8) cumsum(const Problem p) {
  for (std::int64_t item = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; item < p.items;
       item += std::int64_t{gridDim.x} * kThreads) {
    const std::int64_t slot = p.heads.divide(item), head = item - slot * p.heads.value();
    const cuda::ChunkTokens chunk = p.slots.at(slot);
    const std::int64_t at = chunk.begin * p.heads.value() + head;
    const float* from = p.g + at;
    float* to = p.sum + at;
    float rate = 0, dt_bias = 0, sum = 0;
    if constexpr (kGate) {
      rate = -math::exp(p.a_log[head]);
      dt_bias = p.dt_bias[head];
    }
    float next[kAhead];
    const auto load = [&](int row) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        next[i] = row + i < chunk.rows ? *from : 0.0f;
        from += p.heads.value();
      }
    };
    load(0);
    for (int row = 0; row < chunk.rows; row += kAhead) {
      float g[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) g[i] = next[i];
      load(row + kAhead);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if constexpr (kGate) g[i] = rate * cuda::softplus(g[i] + dt_bias);  // gdn_log_decay
        sum += g[i];
        if (row + i < chunk.rows) *to = sum;
        to += p.heads.value();
      }
    }
  }
}

Status run(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace) {
  const Problem p(d, a);
  return cuda::launch(Op::kName, d.gate ? cumsum<true> : cumsum<false>,
                      cuda::grid_for(p.items, kThreads), a.sum.device.index, stream, p);
}

constexpr Kernel<Op> kKernels[] = {cuda::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<GdnCumsum>> gdn_cumsum_cuda() { return kKernels; }

}  // namespace bittern
