// A block has one key head of a sequence and takes the value heads that use it in turn, or, where
// there are few blocks, one in each group of 128 threads. So nobody else reads or writes the
// channels that it convolves, and conv_state can be updated in place.
//
// A head's state comes into shared memory with one burst of copies. All else that the heads need is
// read meanwhile, at once: what is asked for later is waited for, and nothing hides that.
#include <cmath>

#include "bittern/ops/gdn_decode_step.h"
#include "cuda/device.cuh"
#include "cuda/packs.cuh"
#include "cuda/runtime.cuh"
#include "cuda/silu.cuh"
#include "ops/gdn/gdn.cuh"
#include "ops/gdn/gdn.h"
#include "ops/gdn/gdn_step.cuh"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = GdnDecodeStep;
using cuda::Destinations;
using cuda::Divisor;
using cuda::Pair;
using cuda::Raw;
using cuda::strided_dot;
using cuda::TokenStrides;
using cuda::Vec;

constexpr int kThreads = cuda::kSumThreads;  // of a group
constexpr int kMostGroups = 3;               // their tiles fill the shared memory of an H200
constexpr int kTile = 128 * 128;             // elements, at most
constexpr int kTaps = 4, kReach = kTaps - 1;
constexpr int kMostTokens = static_cast<int>(Op::kMostTokens);
constexpr int kStaged = 2048;  // numbers of v that a block has at once
constexpr int kPack = 4;       // channels of a thread

struct Gates {
  float decay, beta;
};

struct Problem : cuda::StepStates {
  const void *x, *z, *g, *beta, *conv_weight, *norm_weight, *conv_bias;
  const float *a_log, *dt_bias;
  void *conv_state, *y, *conv_snapshots;
  std::int64_t x_row, x_token, conv_slot, conv_channel, conv_step;
  TokenStrides z_stride, g_stride, beta_stride, y_stride;
  std::int64_t channels, items;
  Divisor key_heads;
  int heads;      // value heads of a key head
  int absent;     // taps: kTaps less the width
  int extent;     // columns or rows of a tile
  int parts;      // tiles of a head
  int groups;     // of threads
  int staged;     // value heads whose inputs a block has at once: a multiple of `groups`
  int tile, own;  // floats of a tile, and of what else a group has
  bool packed;    // width 4, and channels that lie as packs
  bool z_pieces;  // rows of z can be copied 16 bytes at a time
  float scale, eps;
  bool tiled, each, allow_neg_eigval;

  Problem(const Op::Desc& d, const Op::Args& a, int device)
      : StepStates(d.step(), a),
        x(a.x.data),
        z(a.z.data),
        g(a.g.data),
        beta(a.beta.data),
        conv_weight(a.conv_weight.data),
        norm_weight(a.norm_weight.data),
        conv_bias(a.conv_bias.data),
        a_log(a.a_log.as<float>()),
        dt_bias(a.dt_bias.as<float>()),
        conv_state(a.conv_state.data),
        y(a.y.data),
        conv_snapshots(a.conv_snapshots.data),
        x_row(a.x.stride[0]),
        x_token(a.x.stride[1]),
        conv_slot(a.conv_state.stride[0]),
        conv_channel(a.conv_state.stride[1]),
        conv_step(a.conv_state.stride[2]),
        z_stride(a.z),
        g_stride(a.g),
        beta_stride(a.beta),
        y_stride(a.y),
        channels(d.channels()),
        items(d.batch * d.key_heads),
        key_heads(d.key_heads),
        heads(static_cast<int>(d.value_heads / d.key_heads)),
        absent(kTaps - d.width),
        scale(d.step().heads().query_scale()),
        eps(static_cast<float>(d.eps)),
        tiled(d.head_map == HeadMap::tiled),
        each(d.rounding == NormRounding::each),
        allow_neg_eigval(d.allow_neg_eigval) {
    if (d.state_layout == StateLayout::key_value) {
      extent = std::min(keys > 128 ? 64 : 128, (values + 31) / 32 * 32);
      tile = keys * extent;
    } else {
      extent = std::min(kTile / keys, values);
      tile = (keys * extent + 3) / 4 * 4;
    }
    parts = (values + extent - 1) / extent;
    own = (extent + 3) / 4 * 4 + 2 * cuda::kSumRows;  // deltas, sums
    const std::size_t element = size_of(d.element);
    const std::size_t pack = kPack * element;
    z_pieces = static_cast<std::size_t>(values) * element % 16 == 0 && aligned(a.z, 3, 16);
    packed = d.width == kTaps && keys % kPack == 0 && values % kPack == 0 &&
             conv_channel == kReach && conv_step == 1 && aligned(a.x, 2, pack) &&
             aligned(a.conv_weight, 0, pack) && aligned(a.conv_bias, 0, pack) &&
             aligned(a.conv_state, 1, pack) && aligned(a.conv_snapshots, 0, pack);
    // Where there are fewer items than multiprocessors, blocks grow.
    const cuda::Limits& limits = cuda::limits(device);
    const std::int64_t most = (limits.multiprocessors - 1) / std::max<std::int64_t>(items, 1) + 1;
    groups = static_cast<int>(std::min<std::int64_t>({heads, kMostGroups, most}));
    for (stage(); groups > 1 && shared(element) > limits.shared_per_block; stage()) --groups;
  }
  // Whether every index of the first `axes` axes starts at a multiple of `bytes`.
  template <class View>
  static bool aligned(const View& v, int axes, std::size_t bytes) {
    bool all = reinterpret_cast<std::uintptr_t>(v.data) % bytes == 0;
    for (int i = 0; i < axes; ++i)
      all = all && (v.shape[i] == 1 ||
                    static_cast<std::size_t>(v.stride[i]) * size_of(v.dtype) % bytes == 0);
    return all;
  }
  void stage() {
    const int fit = kStaged / (static_cast<int>(tokens) * values) / groups * groups;
    staged = std::min(std::max(fit, groups), (heads + groups - 1) / groups * groups);
  }
  // v in f32, z as it is and the gates, of the staged heads and all tokens.
  __host__ __device__ int staged_rows() const { return staged * static_cast<int>(tokens); }
  std::size_t shared(std::size_t element) const {
    const auto rows = static_cast<std::size_t>(staged_rows());
    const std::size_t floats = static_cast<std::size_t>(groups * (tile + own)) +
                               static_cast<std::size_t>(pair_floats() + kMostTokens) +
                               rows * static_cast<std::size_t>(values + 2);
    return floats * sizeof(float) + rows * static_cast<std::size_t>(values) * element + 16;
  }
  __host__ __device__ int pair_floats() const {
    return (2 * static_cast<int>(tokens) * keys + 3) / 4 * 4;
  }

  __device__ std::int64_t head(std::int64_t key_head, int i) const {
    return tiled ? key_head + i * key_heads.value() : key_head * heads + i;
  }
  __device__ std::int64_t v_channel(std::int64_t head) const {
    return 2 * key_heads.value() * keys + head * values;
  }
};

// A block's sequence and key head.
struct Item {
  std::int64_t sequence, key_head, slot;
};

// One channel of the convolution. Of a width below 4, the first taps are absent.
struct Channel {
  float before[kReach], tap[kTaps], bias, x;

  template <class X>
  __device__ void load(const Problem& p, const Item& item, std::int64_t c) {
    const auto* weight = static_cast<const X*>(p.conv_weight) + c * (kTaps - p.absent) - p.absent;
#pragma unroll
    for (int j = 0; j < kTaps; ++j)
      if (j >= p.absent) tap[j] = cuda::load_math(weight[j]);
#pragma unroll
    for (int j = 0; j < kReach; ++j)
      if (j >= p.absent) before[j] = cuda::load_math(*state<X>(p, item, c, j));
    bias = p.conv_bias == nullptr ? 0.0f : cuda::load_math(static_cast<const X*>(p.conv_bias)[c]);
    load_x<X>(p, item, 0, c);
  }
  template <class X>
  __device__ void load_x(const Problem& p, const Item& item, std::int64_t token, std::int64_t c) {
    x = cuda::load_math(
        static_cast<const X*>(p.x)[item.sequence * p.x_row + token * p.x_token + c]);
  }
  template <class X>
  __device__ static X* state(const Problem& p, const Item& item, std::int64_t c, int j) {
    return static_cast<X*>(p.conv_state) + item.slot * p.conv_slot + c * p.conv_channel +
           (j - p.absent) * p.conv_step;
  }

  __device__ float sum(int absent) const {
    float u = bias;
#pragma unroll
    for (int j = 0; j < kReach; ++j)
      if (j >= absent) u = std::fma(tap[j], before[j], u);
    return std::fma(tap[kReach], x, u);
  }
  __device__ void shift() {
#pragma unroll
    for (int j = 0; j + 1 < kReach; ++j) before[j] = before[j + 1];
    before[kReach - 1] = x;
  }
  template <class X>
  __device__ void snapshot(const Problem& p, const Item& item, std::int64_t token,
                           std::int64_t c) const {
    X* to = static_cast<X*>(p.conv_snapshots) +
            ((item.sequence * p.tokens + token) * p.channels + c) * (kReach - p.absent) - p.absent;
#pragma unroll
    for (int j = 0; j < kReach; ++j)
      if (j >= p.absent) to[j] = cuda::store_math<X>(before[j]);
  }
};

// The channels of a key head, and of its value heads [first, first + count), as one row: q, k, v, v
// ..., of which a block takes all.
struct Row {
  const Problem& p;
  const Item& item;
  int first;

  __device__ std::int64_t channel(int i) const {
    if (i < p.keys) return item.key_head * p.keys + i;
    if (i < 2 * p.keys) return (p.key_heads.value() + item.key_head - 1) * p.keys + i;
    const int at = i - 2 * p.keys, n = at / p.values;
    return p.v_channel(p.head(item.key_head, first + n)) + (at - n * p.values);
  }
};

// put(i, token, q, k or v) for i of the row, from `begin` to `end`: a thread takes every so many.
template <class X, class Put>
__device__ void convolve(const Row& row, int begin, int end, Put&& put) {
  const Problem& p = row.p;
  for (int i = begin + static_cast<int>(threadIdx.x); i < end; i += static_cast<int>(blockDim.x)) {
    const std::int64_t c = row.channel(i);
    Channel channel = {};
    channel.template load<X>(p, row.item, c);
    for (int token = 0; token < static_cast<int>(p.tokens); ++token) {
      const float u[1] = {channel.sum(p.absent)};
      float y[1];
      cuda::with_silu<X, false>(u, y);
      put(i, token, cuda::load_math(cuda::store_math<X>(y[0])));
      channel.shift();
      if (p.conv_snapshots != nullptr) channel.template snapshot<X>(p, row.item, token, c);
      if (token + 1 < p.tokens) channel.template load_x<X>(p, row.item, token + 1, c);
    }
#pragma unroll
    for (int j = 0; j < kReach; ++j)
      if (j >= p.absent)
        *Channel::state<X>(p, row.item, c, j) = cuda::store_math<X>(channel.before[j]);
  }
}

// The same by packs of channels, of width 4.
template <class X, class Put>
__device__ void convolve_packs(const Row& row, int begin, int end, Put&& put) {
  const Problem& p = row.p;
  for (int i = begin + kPack * static_cast<int>(threadIdx.x); i < end;
       i += kPack * static_cast<int>(blockDim.x)) {
    const std::int64_t c = row.channel(i);
    const auto* x = static_cast<const X*>(p.x) + row.item.sequence * p.x_row + c;
    X* const state = static_cast<X*>(p.conv_state) + row.item.slot * p.conv_slot + c * kReach;
    Raw<X, kPack> taps[kPack], held[kReach];
    auto now = Raw<X, kPack>::load(x);
#pragma unroll
    for (int j = 0; j < kReach; ++j) held[j] = Raw<X, kPack>::load(state + j * kPack);
#pragma unroll
    for (int n = 0; n < kPack; ++n)
      taps[n] = Raw<X, kPack>::template load<true>(static_cast<const X*>(p.conv_weight) +
                                                   (c + n) * kTaps);
    const auto bias = Raw<X, kPack>::template load<true>(static_cast<const X*>(p.conv_bias) + c,
                                                         p.conv_bias != nullptr);
    float before[kReach][kPack];
#pragma unroll
    for (int e = 0; e < kReach * kPack; ++e)
      before[e % kReach][e / kReach] = held[e / kPack][e % kPack];
    const auto store = [&](X* to) {
#pragma unroll
      for (int j = 0; j < kReach; ++j) {
        float part[kPack];
#pragma unroll
        for (int n = 0; n < kPack; ++n) {
          const int e = j * kPack + n;
          part[n] = before[e % kReach][e / kReach];
        }
        Raw<X, kPack>::narrow(part).store(to + j * kPack);
      }
    };
    for (int token = 0; token < static_cast<int>(p.tokens); ++token) {
      float u[kPack], y[kPack];
#pragma unroll
      for (int n = 0; n < kPack; ++n) {
        u[n] = bias[n];
#pragma unroll
        for (int j = 0; j < kReach; ++j) u[n] = std::fma(taps[n][j], before[j][n], u[n]);
        u[n] = std::fma(taps[n][kReach], now[n], u[n]);
      }
      cuda::with_silu<X, false>(u, y);
#pragma unroll
      for (int n = 0; n < kPack; ++n) {
        put(i + n, token, cuda::load_math(cuda::store_math<X>(y[n])));
#pragma unroll
        for (int j = 0; j + 1 < kReach; ++j) before[j][n] = before[j + 1][n];
        before[kReach - 1][n] = now[n];
      }
      if (p.conv_snapshots != nullptr)
        store(static_cast<X*>(p.conv_snapshots) +
              ((row.item.sequence * p.tokens + token) * p.channels + c) * kReach);
      if (token + 1 < p.tokens) now = Raw<X, kPack>::load(x + (token + 1) * p.x_token);
    }
    store(state);
  }
}

// By a warp: a token's k and q, normalised and scaled; returns k.q.
__device__ float normalise(const Problem& p, Pair* pairs) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const bool of_q = lane >= kDotLanes;
  const auto x = [&](int i) { return of_q ? pairs[i].q : pairs[i].k; };
  const float inverse = 1.0f / std::sqrt(strided_dot(p.keys, x, x) + 1e-6f);
  const float of_keys = __shfl_sync(~0u, inverse, 0);
  const float of_queries = __shfl_sync(~0u, inverse, kDotLanes);
  for (int i = lane; i < p.keys; i += 32)
    pairs[i] = {pairs[i].k * of_keys, pairs[i].q * of_queries * p.scale};
  __syncwarp();
  return strided_dot(p.keys, [&](int i) { return pairs[i].k; }, [&](int i) { return pairs[i].q; });
}

// What the gates of a token and head are made of, loaded early and used late.
struct GateInputs {
  float g, beta, a_log, dt_bias;

  template <class X>
  __device__ static GateInputs load(const Problem& p, const Item& item, std::int64_t token,
                                    std::int64_t head) {
    const auto at = [&](const void* from, const TokenStrides& stride) {
      return cuda::load_math(static_cast<const X*>(from)[stride.at(item.sequence, token, head)]);
    };
    return {at(p.g, p.g_stride), at(p.beta, p.beta_stride), p.a_log[head], p.dt_bias[head]};
  }
  __device__ Gates gates(bool allow_neg_eigval) const {
    const float strength = math::sigmoid(beta);
    return {math::exp(gdn_log_decay(g, a_log, dt_bias)),
            allow_neg_eigval ? 2 * strength : strength};
  }
};

// By a group: y from o, with z in shared memory.
template <class X>
__device__ void gate_output(const Problem& p, const float* o, const X* z, const float (&weights)[2],
                            X* y, int thread) {
  const auto value = [&](int j) { return o[j]; };
  const auto rounded = [&](float v) {
    return p.each ? cuda::load_math(cuda::store_math<X>(v)) : v;
  };
  const float squares = strided_dot(p.values, value, value);
  const float rstd = 1.0f / std::sqrt(squares / static_cast<float>(p.values) + p.eps);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int j = thread + n * kThreads;
    if (j >= p.values) break;
    const float gate[1] = {cuda::load_math(z[j])};
    float out[1] = {rounded(rounded(o[j] * rstd) * weights[n])};
    cuda::with_silu<X, true>(gate, out);
    y[j] = cuda::store_math<X>(out[0]);
  }
}

// What a sequence without a state gives, by the whole block: zeros.
template <class X>
__device__ void skip(const Problem& p, const Item& item) {
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int reach = kReach - p.absent;
  for (std::int64_t token = 0; token < p.tokens; ++token) {
    const auto clear = [&](std::int64_t channel, int count) {
      if (p.conv_snapshots == nullptr) return;
      X* to = static_cast<X*>(p.conv_snapshots) +
              ((item.sequence * p.tokens + token) * p.channels + channel) * reach;
      for (int i = thread; i < count * reach; i += threads) to[i] = cuda::store_math<X>(0.0f);
    };
    clear(item.key_head * p.keys, p.keys);
    clear((p.key_heads.value() + item.key_head) * p.keys, p.keys);
    for (int i = 0; i < p.heads; ++i) {
      const std::int64_t head = p.head(item.key_head, i);
      clear(p.v_channel(head), p.values);
      X* y = static_cast<X*>(p.y) + p.y_stride.at(item.sequence, token, head);
      for (int j = thread; j < p.values; j += threads) y[j] = cuda::store_math<X>(0.0f);
      if (p.snapshots == nullptr) continue;
      float* to = p.snapshot(item.sequence, token, head);
      for (int j = thread; j < p.keys * p.values; j += threads) to[j] = 0;
    }
  }
}

template <class X, bool kByRows, int N>
__global__ void __launch_bounds__(kMostGroups* kThreads) decode(const Problem p) {
  const int group = static_cast<int>(threadIdx.x) / kThreads;
  const int thread = static_cast<int>(threadIdx.x) % kThreads;
  const int threads = static_cast<int>(blockDim.x), tokens = static_cast<int>(p.tokens);
  // Shared memory: each group's tile; the key head's tokens; deltas and sums of each group; of the
  // staged heads, [head][token], v in whose place comes o, gates, z.
  auto* const shared = cuda::dynamic_shared<float>();
  float* const tile = shared + group * p.tile;
  auto* const pairs = reinterpret_cast<Pair*>(shared + p.groups * p.tile);
  float* const kq = shared + p.groups * p.tile + p.pair_floats();
  float* const deltas = kq + kMostTokens + group * p.own;
  auto* const sums = reinterpret_cast<cuda::StepSums*>(deltas + (p.extent + 3) / 4 * 4);
  float* const staged_v = kq + kMostTokens + p.groups * p.own;
  auto* const staged_gates = reinterpret_cast<Gates*>(staged_v + p.staged_rows() * p.values +
                                                      (p.staged_rows() * p.values) % 2);
  auto* const staged_z = reinterpret_cast<X*>(
      shared + (staged_v - shared + p.staged_rows() * (p.values + 2) + 1 + 3) / 4 * 4);
  const auto meet = [&] { cuda::barrier_wait(1 + group, kThreads); };
  // To copy and to change a tile of columns, extent / N threads have a row, N columns each.
  const int across = thread % (p.extent / N) * N, down = thread / (p.extent / N);
  const int step = kThreads / (p.extent / N);
  float weights[2] = {};
#pragma unroll
  for (int n = 0; n < 2; ++n)
    if (thread + n * kThreads < p.values)
      weights[n] = cuda::load_math(static_cast<const X*>(p.norm_weight)[thread + n * kThreads]);

  for (std::int64_t index = blockIdx.x; index < p.items; index += gridDim.x) {
    Item item;
    item.sequence = p.key_heads.divide(index);
    item.key_head = index - item.sequence * p.key_heads.value();
    item.slot = p.slot(item.sequence);
    if (item.slot == -1) skip<X>(p, item);
    if (!p.in_range(item.slot)) continue;
    const auto fetch_part = [&](int i, int part) {
      const float* const state = p.state_of(item.slot, p.head(item.key_head, i));
      const int first = part * p.extent;
      const int count = min(p.extent, p.values - first);
      if constexpr (kByRows) {
        for (int k = thread % 32 * N; k < p.keys; k += 32 * N) {
#pragma unroll 8
          for (int row = thread / 32; row < count; row += kThreads / 32)
            cuda::fetch<N>(tile + row * p.keys + k, state + (first + row) * p.row_stride + k);
        }
      } else if (across < count && down < step) {
#pragma unroll 8
        for (int k = down; k < p.keys; k += step)
          cuda::fetch<N>(tile + k * p.extent + across, state + k * p.row_stride + first + across);
      }
      cuda::copy_async_commit();
    };
    fetch_part(group, 0);

    for (int round = 0; round < p.heads; round += p.staged) {
      const int count = min(p.staged, p.heads - round);
      if (round > 0) __syncthreads();
      // Everything is asked for before anything is used.
      const int own = threads - 1 - static_cast<int>(threadIdx.x);  // the first of its gates
      const auto gate_inputs = [&](int i) {
        const int n = i / tokens;
        return GateInputs::load<X>(p, item, i - n * tokens, p.head(item.key_head, round + n));
      };
      GateInputs inputs = {};
      if (own < count * tokens) inputs = gate_inputs(own);
      const int z_step = p.z_pieces ? 16 / static_cast<int>(sizeof(X)) : 1;
      for (int i = static_cast<int>(threadIdx.x) * z_step; i < count * tokens * p.values;
           i += threads * z_step) {
        const int row = i / p.values, n = row / tokens;
        const X* from =
            static_cast<const X*>(p.z) + i - row * p.values +
            p.z_stride.at(item.sequence, row - n * tokens, p.head(item.key_head, round + n));
        if (p.z_pieces) {
          cuda::copy_async_16(staged_z + i, from);
        } else {
          staged_z[i] = *from;
        }
      }
      cuda::copy_async_commit();
      const auto put = [&](int i, int token, float y) {
        if (i < p.keys) {
          pairs[token * p.keys + i].q = y;
        } else if (i < 2 * p.keys) {
          pairs[token * p.keys + i - p.keys].k = y;
        } else {
          const int at = i - 2 * p.keys, n = at / p.values;
          staged_v[(n * (tokens - 1) + token) * p.values + at] = y;
        }
      };
      const Row row{p, item, round};
      const int begin = round == 0 ? 0 : 2 * p.keys, end = 2 * p.keys + count * p.values;
      if (p.packed) {
        convolve_packs<X>(row, begin, end, put);
      } else {
        convolve<X>(row, begin, end, put);
      }
      __syncthreads();
      if (round == 0) {
        for (int token = static_cast<int>(threadIdx.x) / 32; token < tokens;
             token += threads / 32) {
          const float product = normalise(p, pairs + token * p.keys);
          if (threadIdx.x % 32 == 0) kq[token] = product;
        }
      }
      if (own < count * tokens) staged_gates[own] = inputs.gates(p.allow_neg_eigval);
      for (int i = own + threads; i < count * tokens; i += threads)
        staged_gates[i] = gate_inputs(i).gates(p.allow_neg_eigval);
      cuda::copy_async_wait<0>();
      __syncthreads();

      for (int n = group; n < count; n += p.groups) {
        const std::int64_t head = p.head(item.key_head, round + n);
        float* const state = p.state_of(item.slot, head);
        const bool more = round + n + p.groups < p.heads;
        for (int part = 0; part < p.parts; ++part) {
          const int first = part * p.extent, width = min(p.extent, p.values - first);
          for (int token = 0; token < tokens; ++token) {
            const bool last = token + 1 == tokens;
            const Pair* const pair = pairs + token * p.keys;
            const Gates now = staged_gates[n * tokens + token];
            float* const values = staged_v + (n * tokens + token) * p.values + first;
            if (token == 0) cuda::copy_async_wait<0>();
            meet();
            // delta_j, and o_j in the place of v_j
            const auto emit = [&](int j, const cuda::StepSums& s) {
              const float delta = now.beta * std::fma(-now.decay, s.sk, values[j]);
              const float o = std::fma(kq[token], delta, now.decay * s.sq);
              values[j] = cuda::load_math(cuda::store_math<X>(o));
              deltas[j] = delta;
            };
            if constexpr (kByRows) {
              for (int row_at = 0; row_at < width; row_at += cuda::kSumRows) {
                const int rows = min(cuda::kSumRows, width - row_at);
                cuda::row_sums(tile + row_at * p.keys, rows, p.keys, pair, thread, sums);
                meet();
                if (thread < rows) emit(row_at + thread, sums[thread]);
                meet();
              }
            } else {
              if (thread < width)
                emit(thread, cuda::column_sums(tile + thread, p.extent, p.keys, pair));
              meet();
            }
            const auto change = [&](auto&& put_piece) {
              if constexpr (kByRows) {
                cuda::update_rows<N>(tile, width, p.keys, pair, deltas, now.decay, thread,
                                     [&](int at, int column, const Vec<N>& s) {
                                       put_piece(at, column, at * p.keys + column, s);
                                     });
              } else if (across < width && down < step) {
                cuda::update_columns<N>(
                    tile, p.extent, p.keys, pair, deltas, now.decay, across, down, step,
                    [&](int at, int inside, const Vec<N>& s) { put_piece(at, across, inside, s); });
              }
            };
            float* const target = state + first * (kByRows ? p.row_stride : 1);
            if (last && p.snapshots == nullptr) {
              change([&](int at, int column, int, const Vec<N>& s) {
                Vec<N>::of(target + at * p.row_stride + column) = s;
              });
            } else {
              float* snapshot = nullptr;
              if (p.snapshots != nullptr)
                snapshot = p.snapshot(item.sequence, token, head) + first * (kByRows ? p.keys : 1);
              const Destinations to{snapshot, last ? target : nullptr, tile,
                                    kByRows ? p.keys : p.values, p.row_stride};
              change([&](int at, int column, int inside, const Vec<N>& s) {
                to.put(at, column, inside, s);
              });
            }
            meet();
          }
          if (part + 1 < p.parts) {
            fetch_part(round + n, part + 1);
          } else if (more) {
            fetch_part(round + n + p.groups, 0);
          }
        }
        for (int token = 0; token < tokens; ++token) {
          const int at = (n * tokens + token) * p.values;
          gate_output<X>(p, staged_v + at, staged_z + at, weights,
                         static_cast<X*>(p.y) + p.y_stride.at(item.sequence, token, head), thread);
        }
      }
    }
    __syncthreads();
  }
}

Status run(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace) {
  if (d.tokens == 0) return {};
  const int device = a.state.device.index;
  return visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    const Problem p(d, a, device);
    const cuda::Grid grid{
        .blocks = p.items, .threads = p.groups * kThreads, .shared = p.shared(sizeof(X))};
    const auto go = [&](auto* kernel) {
      return cuda::launch(Op::kName, kernel, grid, device, stream, p);
    };
    if (d.state_layout == StateLayout::value_key)
      return p.pieces ? go(decode<X, true, 4>) : go(decode<X, true, 1>);
    return p.pieces ? go(decode<X, false, 4>) : go(decode<X, false, 1>);
  });
}

constexpr Kernel<Op> kKernels[] = {cuda::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<GdnDecodeStep>> gdn_decode_step_cuda() { return kKernels; }

}  // namespace bittern
