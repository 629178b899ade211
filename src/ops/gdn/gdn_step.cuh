// What the kernels that go token by token share: where states lie, and a part of one in shared
// memory, the tile, that is summed over and changed.
#pragma once
#include <cmath>
#include <cstdint>

#include "bittern/gdn_desc.h"
#include "cuda/ptx.cuh"
#include "ops/gdn/gdn.cuh"

namespace bittern::cuda {

struct StepStates {
  const std::int32_t* state_index;  // null: sequence s has state s
  float* state;
  float* snapshots;                                    // null: left out
  std::int64_t state_stride, head_stride, row_stride;  // to the next state, its head, their row
  std::int64_t tokens, value_heads, states;
  int keys, values;
  bool pieces;  // states can be accessed 16 bytes at a time

  template <class Args>
  StepStates(const GdnStepDesc& d, const Args& a)
      : state_index(d.pool > 0 ? a.state_index.template as<std::int32_t>() : nullptr),
        state(a.state.template as<float>()),
        snapshots(a.snapshots.template as<float>()),
        state_stride(a.state.stride[0]),
        head_stride(a.state.stride[1]),
        row_stride(a.state.stride[2]),
        tokens(d.tokens),
        value_heads(d.value_heads),
        states(d.states()),
        keys(static_cast<int>(d.key_dim)),
        values(static_cast<int>(d.value_dim)),
        pieces(reinterpret_cast<std::uintptr_t>(state) % 16 == 0 &&
               reinterpret_cast<std::uintptr_t>(snapshots) % 16 == 0 &&
               (d.state_layout == StateLayout::key_value ? values : keys) % 4 == 0 &&
               (state_stride % 4 == 0 || states == 1) &&
               (head_stride % 4 == 0 || value_heads == 1) &&
               (row_stride % 4 == 0 || a.state.shape[2] == 1)) {}

  // -1: the sequence is skipped.
  __device__ std::int64_t slot(std::int64_t sequence) const {
    return state_index != nullptr ? state_index[sequence] : sequence;
  }
  __device__ bool in_range(std::int64_t slot) const { return slot >= 0 && slot < states; }
  __device__ float* state_of(std::int64_t slot, std::int64_t head) const {
    return state + slot * state_stride + head * head_stride;
  }
  __device__ float* snapshot(std::int64_t sequence, std::int64_t token, std::int64_t head) const {
    return snapshots + ((sequence * tokens + token) * value_heads + head) * keys * values;
  }
};

struct Pair {
  float k, q;
};

// S^T k and S^T q at one value.
struct StepSums {
  float sk, sq;
};

// N elements of a state that lie together.
template <int N>
struct alignas(N * sizeof(float)) Vec {
  float at[N];
  __device__ static Vec& of(float* p) { return *reinterpret_cast<Vec*>(p); }
};

// N elements into the tile.
template <int N>
__device__ inline void fetch(float* tile, const float* from) {
  if constexpr (N == 4) {
    copy_async_16(tile, from);
  } else {
    *tile = *from;
  }
}

// S = fma(k_i, delta_j, a S)
__device__ inline float updated(float k, float delta, float decay, float s) {
  return std::fma(k, delta, decay * s);
}

// Where a token's state goes: to the snapshots, if there are any, and to the state after the last
// token, or to be used for the next one.
struct Destinations {
  float *snapshot, *state, *tile;  // the first two may be null
  int snapshot_stride;             // to the next row
  std::int64_t state_stride;
  template <int N>
  __device__ void put(int row, int column, int inside, const Vec<N>& s) const {
    if (snapshot != nullptr) Vec<N>::of(snapshot + row * snapshot_stride + column) = s;
    if (state != nullptr) {
      Vec<N>::of(state + row * state_stride + column) = s;
    } else {
      Vec<N>::of(tile + inside) = s;
    }
  }
};

// ---- state [key_dim, value_dim], a tile [keys][width]: a thread sums a column ----

__device__ inline StepSums column_sums(const float* column, int width, int keys,
                                       const Pair* pairs) {
  StepSums s = {};
#pragma unroll 16
  for (int i = 0; i < keys; ++i) {
    const float x = column[i * width];
    s.sk = std::fma(x, pairs[i].k, s.sk);
    s.sq = std::fma(x, pairs[i].q, s.sq);
  }
  return s;
}

// put(row, index in the tile, N elements) for rows down, down + step, ...: the N columns `across`.
template <int N, class Put>
__device__ inline void update_columns(float* tile, int width, int keys, const Pair* pairs,
                                      float* deltas, float decay, int across, int down, int step,
                                      Put&& put) {
  const auto delta = Vec<N>::of(deltas + across);
#pragma unroll 4
  for (int i = down; i < keys; i += step) {
    auto s = Vec<N>::of(tile + i * width + across);
#pragma unroll
    for (int e = 0; e < N; ++e) s.at[e] = updated(pairs[i].k, delta.at[e], decay, s.at[e]);
    put(i, i * width + across, s);
  }
}

// ---- state [value_dim, key_dim], a tile [rows][keys]: 16 lanes sum a row ----

constexpr int kSumThreads = 128, kSumRows = 32;  // rows at a time

// The sums of up to kSumRows rows. Each half of a warp has four rows, 8 apart: lane l has their
// sums l % 16.
__device__ inline void row_sums(const float* tile, int rows, int keys, const Pair* pairs,
                                int thread, StepSums* sums) {
  constexpr int kLanes = kDotLanes;
  constexpr int kTogether = kSumRows * kLanes / kSumThreads, kApart = kSumRows / kTogether;
  const int own = thread / kLanes, lane = thread % 32;
  StepSums s[kTogether] = {};
#pragma unroll 8
  for (int i = lane % kLanes; i < keys; i += kLanes) {
    const Pair pair = pairs[i];
#pragma unroll
    for (int r = 0; r < kTogether; ++r) {
      const float x = tile[min(own + r * kApart, rows - 1) * keys + i];
      s[r].sk = std::fma(x, pair.k, s[r].sk);
      s[r].sq = std::fma(x, pair.q, s[r].sq);
    }
  }
#pragma unroll
  for (int r = 0; r < kTogether; ++r) {
#pragma unroll
    for (int stride = kLanes / 2; stride > 0; stride /= 2) {
      s[r].sk += __shfl_xor_sync(~0u, s[r].sk, stride);
      s[r].sq += __shfl_xor_sync(~0u, s[r].sq, stride);
    }
    if (lane % kLanes == 0) sums[own + r * kApart] = s[r];
  }
}

// put(row, column, N elements), a warp along a row.
template <int N, class Put>
__device__ inline void update_rows(float* tile, int rows, int keys, const Pair* pairs,
                                   const float* deltas, float decay, int thread, Put&& put) {
  for (int i = thread % 32 * N; i < keys; i += 32 * N) {
    float k[N];
#pragma unroll
    for (int e = 0; e < N; ++e) k[e] = pairs[i + e].k;
#pragma unroll 4
    for (int row = thread / 32; row < rows; row += kSumThreads / 32) {
      auto x = Vec<N>::of(tile + row * keys + i);
#pragma unroll
      for (int e = 0; e < N; ++e) x.at[e] = updated(k[e], deltas[row], decay, x.at[e]);
      put(row, i, x);
    }
  }
}

}  // namespace bittern::cuda
