#include "bittern/ops/causal_conv1d.h"
#include "cuda/runtime.cuh"
#include "cuda/silu.cuh"
#include "ops/layers/conv.cuh"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = CausalConv1d;
using cuda::ConvSequence;
using cuda::Raw;

constexpr int kThreads = 128;
constexpr int kChannels = 4;  // of a thread: packs of 16 bytes of f32, 8 of the half types
constexpr int kBytes = 128;   // of x that a thread has under way at once
template <class X>
constexpr int kTokens = kBytes / (kChannels * sizeof(X));  // of a thread
// Threads that fill the device: below, threads take fewer tokens.
constexpr std::int64_t kThreadsPerMultiprocessor = 1024;

struct Problem {
  cuda::ConvInputs in;
  void* y;
  cuda::ConvTokens y_at;
  cuda::ConvState final_state;
  bool silu;
  std::int64_t run;           // tokens of a thread
  std::int64_t runs, states;  // items: runs of tokens, then sequences, times the packs of a token
};

// y of a token and N channels; a masked one has +0.
template <class X, int kWidth, int N>
__device__ inline void emit(const Problem& p, const cuda::ConvTaps<X, kWidth, N>& taps,
                            const float (&before)[kWidth - 1][N], const float (&now)[N], bool live,
                            X* y) {
  float u[N], out[N];
#pragma unroll
  for (int c = 0; c < N; ++c) out[c] = u[c] = taps.sum(before, now[c], c);
  if (p.silu) cuda::with_silu<X, false>(u, out);
  if (!live) {
#pragma unroll
    for (float& value : out) value = 0;
  }
  Raw<X, N>::narrow(out).store(y);
}

// All kTokens tokens of a run, inside one sequence as those that they see before them: loaded
// together.
template <class X, int kWidth, int N>
__device__ void convolve_run(const Problem& p, const ConvSequence& s, std::int64_t token,
                             std::int64_t channel) {
  constexpr int kReach = kWidth - 1, kAll = kReach + kTokens<X>;
  unsigned live = ~0u;  // bit i: token - kReach + i is not masked
  if (p.in.mask != nullptr) {
    live = 0;
#pragma unroll
    for (int i = 0; i < kAll; ++i)
      live |= static_cast<unsigned>(p.in.mask[token - kReach + i] != 0) << i;
  }
  Raw<X, N> x[kAll];
  const X* from = static_cast<const X*>(p.in.x) + p.in.x_at.at(s, token - kReach) + channel;
#pragma unroll
  for (int i = 0; i < kAll; ++i) {
    x[i] = Raw<X, N>::load(from, (live >> i & 1) != 0);
    from += p.in.x_at.step;
  }
  const cuda::ConvTaps<X, kWidth, N> taps(p.in, channel);
  float before[kReach][N];
#pragma unroll
  for (int i = 0; i < kReach; ++i) x[i].widen(before[i]);
  X* y = static_cast<X*>(p.y) + p.y_at.at(s, token) + channel;
#pragma unroll
  for (int i = kReach; i < kAll; ++i) {
    float now[N];
    x[i].widen(now);
    emit<X, kWidth, N>(p, taps, before, now, (live >> i & 1) != 0, y);
    cuda::shift_in(before, now);
    y += p.y_at.step;
  }
}

// Tokens first .. end - 1, of any sequences, one by one.
template <class X, int kWidth, int N>
__device__ void convolve_tokens(const Problem& p, std::int64_t first, std::int64_t end,
                                std::int64_t channel) {
  const cuda::ConvTaps<X, kWidth, N> taps(p.in, channel);
  for (std::int64_t token = first; token < end; ++token) {
    const bool live = !p.in.masked(token);
    const ConvSequence s = p.in.sequence_of(token);
    const X* x = static_cast<const X*>(p.in.x) + p.in.x_at.at(s, token) + channel;
    float before[kWidth - 1][N], now[N];
    Raw<X, N>::load(x, live).widen(now);
    cuda::inputs_before<X>(p.in, s, token, channel, before);
    emit<X, kWidth, N>(p, taps, before, now, live,
                       static_cast<X*>(p.y) + p.y_at.at(s, token) + channel);
  }
}

// Item: (run of tokens, N channels), channels fastest; behind them (sequence, N channels) for the
// final states.
template <class X, int kWidth, int N>
__global__ void __launch_bounds__(kThreads) convolve(const Problem p) {
  const std::int64_t threads = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t item = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
       item < p.runs + p.states; item += threads) {
    const bool run = item < p.runs;
    const std::int64_t rest = run ? item : item - p.runs;
    const std::int64_t unit = p.in.packs.divide(rest);
    const std::int64_t channel = (rest - unit * p.in.packs.value()) * N;
    if (run) {
      const std::int64_t first = unit * p.run;
      const std::int64_t end = first + p.run < p.in.tokens ? first + p.run : p.in.tokens;
      const ConvSequence s = p.in.sequence_of(first);
      if (N > 1 && end - first == kTokens<X> && end <= s.end && first - s.begin >= kWidth - 1) {
        convolve_run<X, kWidth, N>(p, s, first, channel);
      } else {
        convolve_tokens<X, kWidth, N>(p, first, end, channel);
      }
    } else {
      const ConvSequence s = p.in.sequence(unit);
      float last[kWidth - 1][N];
      cuda::inputs_before<X>(p.in, s, s.end, channel, last);
      cuda::store_state<X>(last, p.final_state, s.index, channel);
    }
  }
}

template <class X, int kWidth, int N>
Status run_packs(const Op::Desc& d, const Op::Args& a, Stream stream) {
  const int device = a.x.device.index;
  const std::int64_t packs = d.channels / N;
  Problem p{.in = {d, a, N},
            .y = a.y.data,
            .y_at = {d, a.y},
            .final_state = cuda::ConvState(a.final_state),
            .silu = d.silu,
            .run = kTokens<X>,
            .runs = 0,
            .states = a.final_state ? d.sequence_count() * packs : 0};
  const std::int64_t full = cuda::limits(device).multiprocessors * kThreadsPerMultiprocessor;
  const auto runs = [&] { return (p.in.tokens + p.run - 1) / p.run; };
  while (p.run > 1 && runs() * packs < full) p.run /= 2;
  if (a.y) p.runs = runs() * packs;
  return cuda::launch(Op::kName, convolve<X, kWidth, N>,
                      cuda::grid_for(p.runs + p.states, kThreads), device, stream, p);
}

Status run(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace) {
  return cuda::visit_conv(d, [&]<class X, class Width>(Type<X>, Width width) {
    return cuda::conv_packs<X, kChannels>(d, a.x, a.weight, a.bias, a.initial_state, a.y,
                                          a.final_state)
               ? run_packs<X, width(), kChannels>(d, a, stream)
               : run_packs<X, width(), 1>(d, a, stream);
  });
}

constexpr Kernel<Op> kKernels[] = {cuda::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<CausalConv1d>> causal_conv1d_cuda() { return kKernels; }

}  // namespace bittern
