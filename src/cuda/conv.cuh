// What the kernels of causal_conv1d and its backward share: where sequences lie, and the operands
// of N channels. N elements are a pack, or N is 1 where addresses or channels do not allow that.
#pragma once
#include "bittern/conv_desc.h"
#include "cuda/packs.cuh"

namespace bittern::cuda {

struct ConvSequence {
  std::int64_t index, begin, end;  // tokens of the whole tensor
};

struct ConvInputs {
  const void *x, *weight, *bias, *initial_state;
  const std::uint8_t* mask;
  const std::int32_t* bounds;  // cu_seqlens; null: each row is a sequence
  std::int64_t channels, sequences, tokens;
  Divisor row;    // tokens of a row
  Divisor packs;  // of a token's channels

  template <class Args>
  ConvInputs(const CausalConvDesc& d, const Args& a, int pack)
      : x(a.x.data),
        weight(a.weight.data),
        bias(a.bias.data),
        initial_state(a.initial_state.data),
        mask(a.mask.template as<std::uint8_t>()),
        bounds(d.n_sequences > 0 ? a.cu_seqlens.template as<std::int32_t>() : nullptr),
        channels(d.channels),
        sequences(d.sequences()),
        tokens(d.batch * d.tokens),
        row(d.tokens),
        packs(d.channels / pack) {}

  __device__ ConvSequence sequence(std::int64_t i) const {
    if (bounds != nullptr) return {i, bounds[i], bounds[i + 1]};
    return {i, i * row.value(), (i + 1) * row.value()};
  }
  // The last one that starts at or before the token: sequences without tokens hold none.
  __device__ ConvSequence sequence_of(std::int64_t token) const {
    if (bounds == nullptr) return sequence(row.divide(token));
    std::int64_t low = 0, high = sequences;
    while (high - low > 1) {
      const std::int64_t middle = (low + high) / 2;
      (bounds[middle] <= token ? low : high) = middle;
    }
    return sequence(low);
  }
  __device__ bool masked(std::int64_t token) const { return mask != nullptr && mask[token] == 0; }
};

// Are the channels packs, in all of these operands? States and weights are then too.
template <class X, int N, class... Views>
bool conv_packs(const CausalConvDesc& d, const Views&... views) {
  return d.channels % N == 0 && (... && packs_aligned<X, N>(views.data, 1, 0));
}

// Taps and bias of N channels, from `channel` on.
template <class X, int kWidth, int N>
struct ConvTaps {
  float weight[kWidth][N], bias[N];

  __device__ ConvTaps(const ConvInputs& in, std::int64_t channel) {
    Pack<X, N> taps[kWidth], biases[1] = {zeros<X, N>()};
    load_shared_packs(static_cast<const X*>(in.weight) + channel * kWidth, taps);
    if (in.bias != nullptr) load_shared_packs(static_cast<const X*>(in.bias) + channel, biases);
    widen(biases[0], bias);
#pragma unroll
    for (int i = 0; i < kWidth * N; ++i)
      weight[i % kWidth][i / kWidth] = load_math(taps[i / N].at[i % N]);
  }
  // The sum before silu: `before` holds the inputs of the tokens before, oldest first.
  __device__ float sum(const float (&before)[kWidth - 1][N], float x, int c) const {
    float u = bias[c];
#pragma unroll
    for (int j = 0; j < kWidth - 1; ++j) u = fmaf(weight[j][c], before[j][c], u);
    return fmaf(weight[kWidth - 1][c], x, u);
  }
};

// The element of a state that position `i` of channel `c` of N has, in packs that follow each
// other.
template <class X, int K, int N>
__device__ inline X& state_element(Pack<X, N> (&packs)[K], int i, int c) {
  return packs[(c * K + i) / N].at[(c * K + i) % N];
}

// The inputs at the kWidth - 1 positions before `token`, which may lie before the sequence's start.
template <class X, int kWidth, int N>
__device__ inline void inputs_before(const ConvInputs& in, const ConvSequence& s,
                                     std::int64_t token, std::int64_t channel,
                                     Pack<X, N> (&before)[kWidth - 1]) {
  constexpr int kReach = kWidth - 1;
  Pack<X, N> state[kReach];
#pragma unroll
  for (auto& pack : state) pack = zeros<X, N>();
  if (token - kReach < s.begin && in.initial_state != nullptr) {
    load_shared_packs(
        static_cast<const X*>(in.initial_state) + (s.index * in.channels + channel) * kReach,
        state);
  }
#pragma unroll
  for (int i = 0; i < kReach; ++i) {
    const std::int64_t at = token - kReach + i;
    before[i] = zeros<X, N>();
    if (at >= s.begin) {
      if (!in.masked(at))
        before[i] = Pack<X, N>::load(static_cast<const X*>(in.x) + at * in.channels + channel);
      continue;
    }
    // Registers have no run-time index: of all places in the state, the one that is meant.
#pragma unroll
    for (int k = 0; k < kReach; ++k) {
      if (at - s.begin != k - kReach) continue;
#pragma unroll
      for (int c = 0; c < N; ++c) before[i].at[c] = state_element(state, k, c);
    }
  }
}

// f(Type<X>, width) with the descriptor's as constants.
template <class F>
Status visit_conv(const CausalConvDesc& d, F&& f) {
  return visit<float, f16, bf16>(d.element, [&]<class X>(Type<X> x) {
    if (d.width == 2) return f(x, std::integral_constant<int, 2>());
    if (d.width == 3) return f(x, std::integral_constant<int, 3>());
    return f(x, std::integral_constant<int, 4>());
  });
}

}  // namespace bittern::cuda
