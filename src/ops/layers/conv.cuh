// What the kernels of causal_conv1d and its backward share: where sequences lie, and the operands
// of N channels. N elements are a pack, or N is 1 where addresses or channels do not allow that.
#pragma once
#include "bittern/conv_desc.h"
#include "cuda/packs.cuh"

namespace bittern::cuda {

struct ConvSequence {
  std::int64_t index, begin, end;  // tokens of the whole tensor
};

// Where tokens lie in x, y or their like: at(token of the whole tensor, its sequence).
struct ConvTokens {
  std::int64_t step;  // to the next token
  std::int64_t gap;   // from a row's end to the next row

  template <class View>
  ConvTokens(const CausalConvDesc& d, const View& v)
      : step(v.stride[1]), gap(d.batch > 1 ? v.stride[0] - d.tokens * v.stride[1] : 0) {}
  // With several rows, each is a sequence.
  __device__ std::int64_t at(const ConvSequence& s, std::int64_t token) const {
    return token * step + s.index * gap;
  }
};

// A state [sequences, channels, width - 1].
struct ConvState {
  void* data;
  std::int64_t sequence, channel, step;
  bool dense;

  template <class View>
  explicit ConvState(const View& v)
      : data(const_cast<void*>(static_cast<const void*>(v.data))),
        sequence(v.stride[0]),
        channel(v.stride[1]),
        step(v.stride[2]),
        dense(v.stride == v.shape.dense_strides()) {}
  template <class X>
  __device__ X* at(std::int64_t index, std::int64_t c, std::int64_t i) const {
    return static_cast<X*>(data) + index * sequence + c * channel + i * step;
  }
};

// A bound of cu_seqlens, which the host cannot check: no token outside the tensor is touched.
__device__ inline std::int64_t conv_bound(std::int64_t bound, std::int64_t tokens) {
  return bound < 0 ? 0 : bound > tokens ? tokens : bound;
}

struct ConvInputs {
  const void *x, *weight, *bias;
  ConvTokens x_at;
  ConvState initial_state;
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
        x_at(d, a.x),
        initial_state(a.initial_state),
        mask(a.mask.template as<std::uint8_t>()),
        bounds(d.sequences > 0 ? a.cu_seqlens.template as<std::int32_t>() : nullptr),
        channels(d.channels),
        sequences(d.sequence_count()),
        tokens(d.batch * d.tokens),
        row(d.tokens),
        packs(d.channels / pack) {}

  __device__ ConvSequence sequence(std::int64_t i) const {
    if (bounds != nullptr) {
      const std::int64_t begin = conv_bound(bounds[i], tokens);
      const std::int64_t end = conv_bound(bounds[i + 1], tokens);
      return {i, begin, end < begin ? begin : end};
    }
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

// Are the channels packs, in all of these operands? Dense states and weights are then too.
template <class X, int N, class... Views>
bool conv_packs(const CausalConvDesc& d, const Views&... views) {
  const auto aligned = [&](const auto& v) {
    const bool tokens = v.shape == d.tensor_shape();
    return packs_aligned<X, N>(v.data, tokens ? d.batch : 1, v.stride[0]) &&
           packs_aligned<X, N>(v.data, tokens ? d.tokens : 1, v.stride[1]);
  };
  return d.channels % N == 0 && (... && aligned(views));
}

// K values for each of N channels, [N, K] in memory: taps, or a state.
template <class X, int K, int N>
__device__ inline void load_columns(const X* from, float (&to)[K][N]) {
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const auto raw = Raw<X, N>::template load<true>(from + k * N);
#pragma unroll
    for (int i = 0; i < N; ++i) to[(k * N + i) % K][(k * N + i) / K] = raw[i];
  }
}
template <class X, int K, int N>
__device__ inline void store_columns(const float (&from)[K][N], X* to) {
#pragma unroll
  for (int k = 0; k < K; ++k) {
    float part[N];
#pragma unroll
    for (int i = 0; i < N; ++i) part[i] = from[(k * N + i) % K][(k * N + i) / K];
    Raw<X, N>::narrow(part).store(to + k * N);
  }
}

template <class X, int K, int N>
__device__ inline void load_state(const ConvState& from, std::int64_t index, std::int64_t channel,
                                  float (&to)[K][N]) {
  if (from.dense) return load_columns<X>(from.at<const X>(index, channel, 0), to);
#pragma unroll
  for (int k = 0; k < K; ++k) {
#pragma unroll
    for (int c = 0; c < N; ++c) to[k][c] = load_math(*from.at<const X>(index, channel + c, k));
  }
}
template <class X, int K, int N>
__device__ inline void store_state(const float (&from)[K][N], const ConvState& to,
                                   std::int64_t index, std::int64_t channel) {
  if (to.dense) return store_columns(from, to.at<X>(index, channel, 0));
#pragma unroll
  for (int k = 0; k < K; ++k) {
#pragma unroll
    for (int c = 0; c < N; ++c) *to.at<X>(index, channel + c, k) = store_math<X>(from[k][c]);
  }
}

// Taps and bias of N channels, from `channel` on.
template <class X, int kWidth, int N>
struct ConvTaps {
  float weight[kWidth][N], bias[N];

  __device__ ConvTaps(const ConvInputs& in, std::int64_t channel) {
    load_columns(static_cast<const X*>(in.weight) + channel * kWidth, weight);
    Raw<X, N>::template load<true>(static_cast<const X*>(in.bias) + channel, in.bias != nullptr)
        .widen(bias);
  }
  // The sum before silu: `before` holds the inputs of the tokens before, oldest first.
  __device__ float sum(const float (&before)[kWidth - 1][N], float x, int c) const {
    float u = bias[c];
#pragma unroll
    for (int j = 0; j < kWidth - 1; ++j) u = fmaf(weight[j][c], before[j][c], u);
    return fmaf(weight[kWidth - 1][c], x, u);
  }
};

// One token later.
template <int kReach, int N>
__device__ inline void shift_in(float (&before)[kReach][N], const float (&now)[N]) {
#pragma unroll
  for (int c = 0; c < N; ++c) {
#pragma unroll
    for (int j = 0; j + 1 < kReach; ++j) before[j][c] = before[j + 1][c];
    before[kReach - 1][c] = now[c];
  }
}

// The inputs at the kReach positions before `token`, which may lie before the sequence's start.
template <class X, int kReach, int N>
__device__ inline void inputs_before(const ConvInputs& in, const ConvSequence& s,
                                     std::int64_t token, std::int64_t channel,
                                     float (&before)[kReach][N]) {
  const X* x = static_cast<const X*>(in.x) + in.x_at.at(s, token - kReach) + channel;
#pragma unroll
  for (int i = 0; i < kReach; ++i) {
    const std::int64_t at = token - kReach + i;
    Raw<X, N>::load(x, at >= s.begin && !in.masked(at)).widen(before[i]);
    x += in.x_at.step;
  }
  const std::int64_t known = token - s.begin;  // positions of the sequence before the token
  if (known >= kReach || in.initial_state.data == nullptr) return;
  float state[kReach][N];
  load_state<X>(in.initial_state, s.index, channel, state);
  // before[i] is state[i + known] where there is one; registers have no run-time index.
#pragma unroll
  for (int shift = 0; shift < kReach; ++shift) {
    if (shift != known) continue;
#pragma unroll
    for (int i = 0; i + shift < kReach; ++i) {
#pragma unroll
      for (int c = 0; c < N; ++c) before[i][c] = state[i + shift][c];
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
