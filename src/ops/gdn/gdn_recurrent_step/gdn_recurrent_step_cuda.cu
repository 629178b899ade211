// A block has a part of one head's state in shared memory: it comes with one burst of copies, is
// summed over, changed, and written once. What makes it fast is that several such blocks share a
// multiprocessor, so that one's sums hide behind the others' traffic.
#include <cmath>

#include "bittern/ops/gdn_recurrent_step.h"
#include "cuda/device.cuh"
#include "cuda/ptx.cuh"
#include "cuda/runtime.cuh"
#include "ops/gdn/gdn.cuh"
#include "ops/gdn/gdn.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = GdnRecurrentStep;
using cuda::Divisor;
using cuda::strided_dot;

// What a block takes of a head: memory that lies together, read and written in its order.
//                              128 x 128: shared memory and threads of a block
constexpr int kColumns = 128;    // of S [key_dim, value_dim]   66 KiB, 128
constexpr int kFewColumns = 64;  // beyond kManyKeys
constexpr int kManyKeys = 128;
constexpr int kRows = 32;  // of S [value_dim, key_dim]   17 KiB, 128
constexpr int kRowThreads = 128;

struct Problem : cuda::TokenOperands {
  const std::int32_t* state_index;  // null: sequence s has state s
  float* state;
  float* snapshots;                                    // null: left out
  std::int64_t state_stride, head_stride, row_stride;  // to the next state, its head, their row
  std::int64_t tokens, value_heads, states;
  int keys, values;
  float scale;
  bool l2norm, gate, beta_sigmoid, allow_neg_eigval;
  bool pieces;           // states can be accessed 16 bytes at a time
  Divisor parts, heads;  // blocks of a head; heads of a sequence
  std::int64_t items;

  Problem(const Op::Desc& d, const Op::Args& a, std::int64_t parts_of_a_head)
      : TokenOperands(d, a),
        state_index(d.pool > 0 ? a.state_index.as<std::int32_t>() : nullptr),
        state(a.state.as<float>()),
        snapshots(a.snapshots.as<float>()),
        state_stride(a.state.stride[0]),
        head_stride(a.state.stride[1]),
        row_stride(a.state.stride[2]),
        tokens(d.tokens),
        value_heads(d.value_heads),
        states(d.states()),
        keys(static_cast<int>(d.key_dim)),
        values(static_cast<int>(d.value_dim)),
        scale(d.heads().query_scale()),
        l2norm(d.qk_l2norm),
        gate(d.gate),
        beta_sigmoid(d.beta_sigmoid),
        allow_neg_eigval(d.allow_neg_eigval),
        pieces(reinterpret_cast<std::uintptr_t>(state) % 16 == 0 &&
               reinterpret_cast<std::uintptr_t>(snapshots) % 16 == 0 &&
               (d.state_layout == StateLayout::key_value ? values : keys) % 4 == 0 &&
               (state_stride % 4 == 0 || states == 1) &&
               (head_stride % 4 == 0 || value_heads == 1) &&
               (row_stride % 4 == 0 || a.state.shape[2] == 1)),
        parts(parts_of_a_head),
        heads(d.value_heads),
        items(d.batch * d.value_heads * parts_of_a_head) {}

  struct Item {
    std::int64_t sequence, head, part;
    float* state;  // of the whole head; null: skipped, or an index that is out of range
    bool skipped = false;
  };
  __device__ Item item(std::int64_t index) const {
    const std::int64_t row = parts.divide(index), part = index - row * parts.value();
    const std::int64_t sequence = heads.divide(row), head = row - sequence * heads.value();
    const std::int64_t slot = state_index != nullptr ? state_index[sequence] : sequence;
    if (slot < 0 || slot >= states) return {sequence, head, part, nullptr, slot == -1};
    return {sequence, head, part, state + slot * state_stride + head * head_stride};
  }
  __device__ float* snapshot(const Item& i, std::int64_t token) const {
    const std::int64_t at = (i.sequence * tokens + token) * value_heads + i.head;
    return snapshots + at * keys * values;
  }
};

struct Pair {
  float k, q;
};

struct Token {
  float decay, beta, kq;
};

// By the whole block: k and q, normalised and scaled, into `pairs`; the rest to every thread.
template <class X>
__device__ Token read_token(const Problem& p, const Problem::Item& item, std::int64_t token,
                            Pair* pairs) {
  const std::int64_t key_head = p.key_head(item.head);
  const auto* q = static_cast<const X*>(p.q) + p.q_stride.at(item.sequence, token, key_head);
  const auto* k = static_cast<const X*>(p.k) + p.k_stride.at(item.sequence, token, key_head);
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  for (int i = thread; i < p.keys; i += threads) {
    const float wide = cuda::load_math(q[i]);
    pairs[i] = {cuda::load_math(k[i]), p.l2norm ? wide : wide * p.scale};
  }
  Token t;
  float g = p.g[p.g_stride.at(item.sequence, token, item.head)];
  if (p.gate) g = gdn_log_decay(g, p.a_log[item.head], p.dt_bias[item.head]);
  t.decay = math::exp(g);
  t.beta = p.beta[p.beta_stride.at(item.sequence, token, item.head)];
  if (p.beta_sigmoid) t.beta = math::sigmoid(t.beta);
  if (p.allow_neg_eigval) t.beta = 2 * t.beta;
  __syncthreads();
  if (p.l2norm) {
    const bool of_q = thread % 32 >= kDotLanes;
    const auto x = [&](int i) { return of_q ? pairs[i].q : pairs[i].k; };
    const float inverse = 1.0f / std::sqrt(strided_dot(p.keys, x, x) + 1e-6f);
    const float of_k = __shfl_sync(~0u, inverse, 0);
    const float of_queries = __shfl_sync(~0u, inverse, kDotLanes);
    __syncthreads();
    for (int i = thread; i < p.keys; i += threads)
      pairs[i] = {pairs[i].k * of_k, pairs[i].q * of_queries * p.scale};
    __syncthreads();
  }
  t.kq = strided_dot(p.keys, [&](int i) { return pairs[i].k; }, [&](int i) { return pairs[i].q; });
  return t;
}

// delta_j and o_j from sk_j and sq_j.
template <class X>
__device__ float emit(const Problem& p, const Problem::Item& item, std::int64_t token,
                      const Token& t, int j, float sk, float sq) {
  const std::int64_t v_at = p.v_stride.at(item.sequence, token, item.head);
  const std::int64_t o_at = p.o_stride.at(item.sequence, token, item.head);
  const float v = cuda::load_math(static_cast<const X*>(p.v)[v_at + j]);
  const float delta = t.beta * std::fma(-t.decay, sk, v);
  static_cast<X*>(p.o)[o_at + j] = cuda::store_math<X>(std::fma(t.kq, delta, t.decay * sq));
  return delta;
}

// What a sequence without a state gives: zeros, by the block that has the head's first part.
template <class X>
__device__ void skip(const Problem& p, const Problem::Item& item) {
  if (item.part != 0) return;
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  for (std::int64_t token = 0; token < p.tokens; ++token) {
    X* o = static_cast<X*>(p.o) + p.o_stride.at(item.sequence, token, item.head);
    for (int j = thread; j < p.values; j += threads) o[j] = cuda::store_math<X>(0.0f);
    if (p.snapshots == nullptr) continue;
    float* to = p.snapshot(item, token);
    for (int i = thread; i < p.keys * p.values; i += threads) to[i] = 0;
  }
}

// N elements of a state that lie together.
template <int N>
struct alignas(N * sizeof(float)) Vec {
  float at[N];
  __device__ static Vec& of(float* p) { return *reinterpret_cast<Vec*>(p); }
};

// S = fma(k_i, delta_j, a S)
__device__ float updated(float k, float delta, float decay, float s) {
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

// ---- state [key_dim, value_dim]: a thread sums a column ----

template <class X, int N>
__global__ void __launch_bounds__(kColumns) step_columns(const Problem p) {
  auto* const tile = cuda::dynamic_shared<float>();  // [keys][blockDim.x]
  __shared__ Vec<4> deltas[kColumns / 4];
  const int width = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
  auto* const pairs = reinterpret_cast<Pair*>(tile + p.keys * width);
  // To copy and to update, width / N threads have a row, N columns each: N rows at a time.
  const int across = thread % (width / N) * N, down = thread / (width / N);
  for (std::int64_t index = blockIdx.x; index < p.items; index += gridDim.x) {
    const Problem::Item item = p.item(index);
    if (item.skipped) skip<X>(p, item);
    if (item.state == nullptr) continue;
    const int first = static_cast<int>(item.part) * width, j = first + thread;
    const bool inside = first + across < p.values;
    if (inside) {
#pragma unroll 8
      for (int i = down; i < p.keys; i += N) {
        const float* from = item.state + i * p.row_stride + first + across;
        if constexpr (N == 4) {
          cuda::copy_async_16(tile + i * width + across, from);
        } else {
          tile[i * width + across] = *from;
        }
      }
    }
    cuda::copy_async_commit();
    for (std::int64_t token = 0; token < p.tokens; ++token) {
      const Token t = read_token<X>(p, item, token, pairs);
      cuda::copy_async_wait<0>();
      __syncthreads();
      if (j < p.values) {
        float sk = 0, sq = 0;
#pragma unroll 16
        for (int i = 0; i < p.keys; ++i) {
          const float s = tile[i * width + thread];
          sk = std::fma(s, pairs[i].k, sk);
          sq = std::fma(s, pairs[i].q, sq);
        }
        reinterpret_cast<float*>(deltas)[thread] = emit<X>(p, item, token, t, j, sk, sq);
      }
      __syncthreads();
      if (inside) {
        const bool last = token + 1 == p.tokens;
        const auto delta = Vec<N>::of(reinterpret_cast<float*>(deltas) + across);
        const auto update = [&](auto&& put) {
#pragma unroll 4
          for (int i = down; i < p.keys; i += N) {
            auto s = Vec<N>::of(tile + i * width + across);
#pragma unroll
            for (int e = 0; e < N; ++e)
              s.at[e] = updated(pairs[i].k, delta.at[e], t.decay, s.at[e]);
            put(i, first + across, i * width + across, s);
          }
        };
        if (last && p.snapshots == nullptr) {
          update([&](int row, int column, int, const Vec<N>& s) {
            Vec<N>::of(item.state + row * p.row_stride + column) = s;
          });
        } else {
          const Destinations to{p.snapshots != nullptr ? p.snapshot(item, token) : nullptr,
                                last ? item.state : nullptr, tile, p.values, p.row_stride};
          update([&](int row, int column, int in_tile, const Vec<N>& s) {
            to.put(row, column, in_tile, s);
          });
        }
      }
      __syncthreads();
    }
  }
}

// ---- state [value_dim, key_dim]: 16 lanes sum a row ----

struct Sums {
  float sk, sq;
};

template <class X, int N>
__global__ void __launch_bounds__(kRowThreads) step_rows(const Problem p) {
  auto* const tile = cuda::dynamic_shared<float>();  // [kRows][keys]
  auto* const pairs = reinterpret_cast<Pair*>(tile + kRows * p.keys);
  __shared__ Sums sums[kRows];
  __shared__ float deltas[kRows];
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  for (std::int64_t index = blockIdx.x; index < p.items; index += gridDim.x) {
    const Problem::Item item = p.item(index);
    if (item.skipped) skip<X>(p, item);
    if (item.state == nullptr) continue;
    const int first = static_cast<int>(item.part) * kRows;
    const int rows = min(kRows, p.values - first);
    float* const state = item.state + first * p.row_stride;
    for (int i = lane * N; i < p.keys; i += 32 * N) {  // a warp along a row
#pragma unroll 8
      for (int row = warp; row < rows; row += kRowThreads / 32) {
        if constexpr (N == 4) {
          cuda::copy_async_16(tile + row * p.keys + i, state + row * p.row_stride + i);
        } else {
          tile[row * p.keys + i] = state[row * p.row_stride + i];
        }
      }
    }
    cuda::copy_async_commit();
    for (std::int64_t token = 0; token < p.tokens; ++token) {
      const Token t = read_token<X>(p, item, token, pairs);
      cuda::copy_async_wait<0>();
      __syncthreads();
      // Each half of a warp has four rows, 8 apart: lane l has their sums l % 16.
      constexpr int kLanes = kDotLanes;
      constexpr int kTogether = kRows * kLanes / kRowThreads, kApart = kRows / kTogether;
      const int own = thread / kLanes;
      Sums s[kTogether] = {};
#pragma unroll 8
      for (int i = lane % kLanes; i < p.keys; i += kLanes) {
        const Pair pair = pairs[i];
#pragma unroll
        for (int r = 0; r < kTogether; ++r) {
          const float x = tile[min(own + r * kApart, rows - 1) * p.keys + i];
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
      __syncthreads();
      if (thread < rows)
        deltas[thread] =
            emit<X>(p, item, token, t, first + thread, sums[thread].sk, sums[thread].sq);
      __syncthreads();
      const bool last = token + 1 == p.tokens;
      // A warp along a row.
      const auto update = [&](auto&& put) {
        for (int i = lane * N; i < p.keys; i += 32 * N) {
          float k[N];
#pragma unroll
          for (int e = 0; e < N; ++e) k[e] = pairs[i + e].k;
#pragma unroll 4
          for (int row = warp; row < rows; row += kRowThreads / 32) {
            auto x = Vec<N>::of(tile + row * p.keys + i);
#pragma unroll
            for (int e = 0; e < N; ++e) x.at[e] = updated(k[e], deltas[row], t.decay, x.at[e]);
            put(row, i, x);
          }
        }
      };
      if (last && p.snapshots == nullptr) {
        update([&](int row, int column, const Vec<N>& x) {
          Vec<N>::of(state + row * p.row_stride + column) = x;
        });
      } else {
        const Destinations to{
            p.snapshots != nullptr ? p.snapshot(item, token) + first * p.keys : nullptr,
            last ? state : nullptr, tile, p.keys, p.row_stride};
        update([&](int row, int column, const Vec<N>& x) {
          to.put(row, column, row * p.keys + column, x);
        });
      }
      __syncthreads();
    }
  }
}

Status run(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace) {
  if (d.tokens == 0) return {};
  const int device = a.state.device.index;
  const auto keys = static_cast<std::size_t>(d.key_dim);
  return visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    if (d.state_layout == StateLayout::value_key) {
      const Problem p(d, a, (d.value_dim + kRows - 1) / kRows);
      return cuda::launch(Op::kName, p.pieces ? step_rows<X, 4> : step_rows<X, 1>,
                          {.blocks = p.items,
                           .threads = kRowThreads,
                           .shared = keys * (kRows * sizeof(float) + sizeof(Pair))},
                          device, stream, p);
    }
    const std::int64_t most = d.key_dim > kManyKeys ? kFewColumns : kColumns;
    const std::int64_t columns = std::min(most, (d.value_dim + 31) / 32 * 32);
    const Problem p(d, a, (d.value_dim + columns - 1) / columns);
    return cuda::launch(
        Op::kName, p.pieces ? step_columns<X, 4> : step_columns<X, 1>,
        {.blocks = p.items,
         .threads = static_cast<int>(columns),
         .shared = keys * (static_cast<std::size_t>(columns) * sizeof(float) + sizeof(Pair))},
        device, stream, p);
  });
}

constexpr Kernel<Op> kKernels[] = {cuda::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<GdnRecurrentStep>> gdn_recurrent_step_cuda() { return kKernels; }

}  // namespace bittern
