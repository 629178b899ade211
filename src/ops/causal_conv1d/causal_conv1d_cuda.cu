#include "bittern/ops/causal_conv1d.h"
#include "cuda/conv.cuh"
#include "cuda/runtime.cuh"
#include "cuda/silu.cuh"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = CausalConv1d;
using cuda::ConvSequence;
using cuda::Pack;

constexpr int kThreads = 128;
constexpr int kMostTokens = 32;  // that a thread walks over: a power of two
constexpr int kChannels = 4;     // of a thread: packs of 16 bytes of f32, 8 of the half types
constexpr int kBytesAhead = 64;  // that a thread has under way while it computes
// Threads that fill the device: below, threads walk over fewer tokens.
constexpr std::int64_t kThreadsPerMultiprocessor = 1024;

struct Problem {
  cuda::ConvInputs in;
  void *y, *final_state;
  bool silu;
  std::int64_t run;            // tokens of a thread
  std::int64_t walks, states;  // items: runs of tokens, then sequences, times the packs of a token
};

// N channels of tokens first .. end - 1, of one sequence after the other.
template <class X, int kWidth, int N>
__device__ void walk(const Problem& p, std::int64_t first, std::int64_t end, std::int64_t channel) {
  constexpr int kAhead = kBytesAhead / (kChannels * sizeof(X));
  const cuda::ConvTaps<X, kWidth, N> taps(p.in, channel);
  const std::int64_t step = p.in.channels;
  for (std::int64_t token = first; token < end;) {
    const ConvSequence s = p.in.sequence_of(token);
    float before[kWidth - 1][N];
    {
      Pack<X, N> packs[kWidth - 1];
      cuda::inputs_before<X, kWidth, N>(p.in, s, token, channel, packs);
#pragma unroll
      for (int i = 0; i < kWidth - 1; ++i) cuda::widen(packs[i], before[i]);
    }
    const auto left = static_cast<int>((s.end < end ? s.end : end) - token);
    const X* x = static_cast<const X*>(p.in.x) + token * step + channel;
    X* y = static_cast<X*>(p.y) + token * step + channel;
    const std::uint8_t* mask = p.in.mask != nullptr ? p.in.mask + token : nullptr;
    token += left;
    // Token t of the walk waits in slot t % kAhead.
    Pack<X, N> slot[kAhead];
    bool live[kAhead];
    const auto fetch = [&](int t, int k) {
      live[k] = t < left && (mask == nullptr || mask[t] != 0);
      slot[k] = live[k] ? Pack<X, N>::load(x) : cuda::zeros<X, N>();
      x += step;
    };
#pragma unroll
    for (int k = 0; k < kAhead; ++k) fetch(k, k);
    for (int t = 0; t < left; t += kAhead) {
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        if (t + k >= left) break;
        const bool seen = live[k];
        float now[N], u[N], out[N];
        cuda::widen(slot[k], now);
        fetch(t + k + kAhead, k);
#pragma unroll
        for (int c = 0; c < N; ++c) {
          u[c] = taps.sum(before, now[c], c);
#pragma unroll
          for (int j = 0; j + 2 < kWidth; ++j) before[j][c] = before[j + 1][c];
          before[kWidth - 2][c] = now[c];
        }
        if (!seen) {
          cuda::zeros<X, N>().store(y);
        } else if (p.silu) {
          cuda::with_silu<X>(u, out, [](float silu, int) { return silu; });
          cuda::narrow<X>(out).store(y);
        } else {
          cuda::narrow<X>(u).store(y);
        }
        y += step;
      }
    }
  }
}

// Item: (run of tokens, N channels), channels fastest; behind them (sequence, N channels) for the
// final states.
template <class X, int kWidth, int N>
__global__ void __launch_bounds__(kThreads, 4) convolve(const Problem p) {
  const std::int64_t threads = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t item = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
       item < p.walks + p.states; item += threads) {
    const bool walks = item < p.walks;
    const std::int64_t unit = p.in.packs.divide(walks ? item : item - p.walks);
    const std::int64_t channel = ((walks ? item : item - p.walks) - unit * p.in.packs.value()) * N;
    if (walks) {
      const std::int64_t first = unit * p.run, end = first + p.run;
      walk<X, kWidth, N>(p, first, end < p.in.tokens ? end : p.in.tokens, channel);
      continue;
    }
    constexpr int kReach = kWidth - 1;
    const ConvSequence s = p.in.sequence(unit);
    Pack<X, N> last[kReach], state[kReach];
    cuda::inputs_before<X, kWidth, N>(p.in, s, s.end, channel, last);
#pragma unroll
    for (int i = 0; i < kReach; ++i) {
#pragma unroll
      for (int c = 0; c < N; ++c) cuda::state_element(state, i, c) = last[i].at[c];
    }
    X* to = static_cast<X*>(p.final_state) + (s.index * p.in.channels + channel) * kReach;
#pragma unroll
    for (int k = 0; k < kReach; ++k) state[k].store(to + k * N);
  }
}

template <class X, int kWidth, int N>
Status run_packs(const Op::Desc& d, const Op::Args& a, Stream stream) {
  const int device = a.x.device.index;
  const std::int64_t packs = d.channels / N;
  Problem p{.in = {d, a, N},
            .y = a.y.data,
            .final_state = a.final_state.data,
            .silu = d.silu,
            .run = kMostTokens,
            .walks = 0,
            .states = a.final_state ? d.sequences() * packs : 0};
  const std::int64_t full = cuda::limits(device).multiprocessors * kThreadsPerMultiprocessor;
  const auto runs = [&] { return (p.in.tokens + p.run - 1) / p.run; };
  while (p.run > 1 && runs() * packs < full) p.run /= 2;
  if (a.y) p.walks = runs() * packs;
  return cuda::launch(Op::kName, convolve<X, kWidth, N>,
                      cuda::grid_for(p.walks + p.states, kThreads), device, stream, p);
}

Status run(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace) {
  return cuda::visit_conv(d, [&]<class X, class Width>(Type<X>, Width width) {
    return cuda::conv_packs<X, kChannels>(d, a.x, a.weight, a.bias, a.initial_state, a.y,
                                          a.final_state)
               ? run_packs<X, width(), kChannels>(d, a, stream)
               : run_packs<X, width(), 1>(d, a, stream);
  });
}

constexpr Kernel<Op> kKernels[] = {
    {.name = "cuda", .backend = "cuda", .architecture = cuda::architecture, .run = run}};

}  // namespace

std::span<const Kernel<CausalConv1d>> causal_conv1d_cuda() { return kKernels; }

}  // namespace bittern
