// A block has a part of one head's state in shared memory: it comes with one burst of copies, is
// summed over, changed, and written once. What makes it fast is that several such blocks share a
// multiprocessor, so that one's sums hide behind the others' traffic.
#include <cmath>

#include "bittern/ops/gdn_recurrent_step.h"
#include "cuda/device.cuh"
#include "cuda/runtime.cuh"
#include "ops/gdn/gdn.cuh"
#include "ops/gdn/gdn.h"
#include "ops/gdn/gdn_step.cuh"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = GdnRecurrentStep;
using cuda::Destinations;
using cuda::Divisor;
using cuda::Pair;
using cuda::strided_dot;
using cuda::Vec;

// What a block takes of a head: memory that lies together, read and written in its order.
//                              128 x 128: shared memory and threads of a block
constexpr int kColumns = 128;    // of S [key_dim, value_dim]   66 KiB, 128
constexpr int kFewColumns = 64;  // beyond kManyKeys
constexpr int kManyKeys = 128;
constexpr int kRows = cuda::kSumRows;  // of S [value_dim, key_dim]   17 KiB, 128
constexpr int kRowThreads = cuda::kSumThreads;

struct Problem : cuda::TokenOperands, cuda::StepStates {
  float scale;
  bool l2norm, gate, beta_sigmoid, allow_neg_eigval;
  Divisor parts, heads;  // blocks of a head; heads of a sequence
  std::int64_t items;

  Problem(const Op::Desc& d, const Op::Args& a, std::int64_t parts_of_a_head)
      : TokenOperands(d, a),
        StepStates(d, a),
        scale(d.heads().query_scale()),
        l2norm(d.qk_l2norm),
        gate(d.gate),
        beta_sigmoid(d.beta_sigmoid),
        allow_neg_eigval(d.allow_neg_eigval),
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
    const std::int64_t own = slot(sequence);
    if (!in_range(own)) return {sequence, head, part, nullptr, own == -1};
    return {sequence, head, part, state_of(own, head)};
  }
  __device__ float* snapshot(const Item& i, std::int64_t token) const {
    return StepStates::snapshot(i.sequence, token, i.head);
  }
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
        cuda::fetch<N>(tile + i * width + across, item.state + i * p.row_stride + first + across);
      }
    }
    cuda::copy_async_commit();
    for (std::int64_t token = 0; token < p.tokens; ++token) {
      const Token t = read_token<X>(p, item, token, pairs);
      cuda::copy_async_wait<0>();
      __syncthreads();
      if (j < p.values) {
        const auto sums = cuda::column_sums(tile + thread, width, p.keys, pairs);
        reinterpret_cast<float*>(deltas)[thread] = emit<X>(p, item, token, t, j, sums.sk, sums.sq);
      }
      __syncthreads();
      if (inside) {
        const bool last = token + 1 == p.tokens;
        const auto update = [&](auto&& put) {
          cuda::update_columns<N>(
              tile, width, p.keys, pairs, reinterpret_cast<float*>(deltas), t.decay, across, down,
              N,
              [&](int row, int in_tile, const Vec<N>& s) { put(row, first + across, in_tile, s); });
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

template <class X, int N>
__global__ void __launch_bounds__(kRowThreads) step_rows(const Problem p) {
  auto* const tile = cuda::dynamic_shared<float>();  // [kRows][keys]
  auto* const pairs = reinterpret_cast<Pair*>(tile + kRows * p.keys);
  __shared__ cuda::StepSums sums[kRows];
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
        cuda::fetch<N>(tile + row * p.keys + i, state + row * p.row_stride + i);
      }
    }
    cuda::copy_async_commit();
    for (std::int64_t token = 0; token < p.tokens; ++token) {
      const Token t = read_token<X>(p, item, token, pairs);
      cuda::copy_async_wait<0>();
      __syncthreads();
      cuda::row_sums(tile, rows, p.keys, pairs, thread, sums);
      __syncthreads();
      if (thread < rows)
        deltas[thread] =
            emit<X>(p, item, token, t, first + thread, sums[thread].sk, sums[thread].sq);
      __syncthreads();
      const bool last = token + 1 == p.tokens;
      const auto update = [&](auto&& put) {
        cuda::update_rows<N>(tile, rows, p.keys, pairs, deltas, t.decay, thread, put);
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
