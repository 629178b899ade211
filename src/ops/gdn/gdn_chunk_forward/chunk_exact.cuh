// The header's sums as they stand, fma by fma: the bits of `ref`.
//
// A block has kColumns values of a head, whose state it keeps in shared memory, and goes through
// its chunks. A thread's rows of a product (exact_tiles.cuh) are tokens or, where the state is
// changed, keys. Keys come in slabs, so that every length of a key fits, also on devices with
// little shared memory.
#pragma once
#include "ops/gdn/chunk_device.cuh"
#include "ops/gdn/exact_tiles.cuh"

namespace bittern::chunk_forward {

using exact::kPitch;
using exact::kSide;
using exact::kSlab;
using exact::kThreads;
using exact::kTile;

template <int kWidth>
struct ExactShared {
  static constexpr int kColumns = kSide * kWidth;
  union {
    struct {
      float k[kSlab][kPitch], q[kSlab][kPitch];  // transposed
    } slab;
    float y[kMostRows][kColumns];
  };
  union {
    struct {
      float l[kMostRows][kMostRows], p[kMostRows][kMostRows];  // transposed
    } of;
    float k[kMostRows][kMostRows];  // tokens, and some keys
  };
  GdnSum sum[kMostRows];
  float g[kMostRows], beta[kMostRows], k_inverse[kMostRows], q_inverse[kMostRows];
  bool masked[kMostRows];  // or past the chunk
  // Then the state, [keys][kColumns].
  __device__ float* state() { return reinterpret_cast<float*>(this + 1); }
};

struct ExactChunk {
  std::int64_t begin;
  int rows;
};

// The elements of a row of q or k, widened; those of masked tokens and past the chunk are 0.
template <class X, class Shared>
__device__ float raw(const Shared& s, const X* x, std::int64_t stride, int row, int i) {
  return s.masked[row] ? 0.0f : cuda::load_math(x[row * stride + i]);
}

template <class X, class Shared>
__device__ void read_gates(const Problem& p, const Problem::Item& item, const ExactChunk& c,
                           const X* q, const X* k, Shared& s) {
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < kMostRows) {
    const std::int64_t token = c.begin + thread;
    const bool there = thread < c.rows && !p.masked(item, token);
    s.masked[thread] = !there;
    s.g[thread] = there ? p.log_decay(item, token) : 0.0f;
    s.beta[thread] = there ? p.strength(item, token) : 0.0f;
  }
  __syncthreads();
  if (thread == 0) {
    double total = 0;
    for (int i = 0; i < c.rows; ++i) {
      total = gdn_next_sum(total, s.g[i]);
      s.sum[i] = gdn_sum(total);
    }
  }
  if (p.d.qk_l2norm) {
    const int keys = static_cast<int>(p.d.key_dim);
    for (int row = thread / kDotLanes; row < kMostRows; row += kThreads / kDotLanes) {
      const auto inverse = [&](const X* x, std::int64_t stride) {
        const auto at = [&](int i) { return raw(s, x, stride, row, i); };
        return 1.0f / std::sqrt(cuda::strided_dot(keys, at, at) + 1e-6f);
      };
      const float of_k = inverse(k, p.k_stride.token), of_q = inverse(q, p.q_stride.token);
      if (thread % kDotLanes == 0) s.k_inverse[row] = of_k, s.q_inverse[row] = of_q;
    }
  }
  __syncthreads();
}

template <class X, int kWidth>
__global__ void __launch_bounds__(kThreads) chunk_exact(const Problem p) {
  using Shared = ExactShared<kWidth>;
  constexpr int kColumns = Shared::kColumns;
  auto& s = *cuda::dynamic_shared<Shared>();
  float* const state = s.state();
  const int thread = static_cast<int>(threadIdx.x);
  const int keys = static_cast<int>(p.d.key_dim);
  const int first = exact::first_row(), column = exact::first_column<kWidth>();
  for (std::int64_t index = blockIdx.x; index < p.items; index += gridDim.x) {
    const Problem::Item item = p.item(index);
    const int first_value = item.part * kColumns;
    const int values = min(static_cast<int>(p.d.value_dim) - first_value, kColumns);
    // Every element of the state, neighbours in memory by neighbouring threads.
    const auto for_state = [&](const StateStrides& stride, auto&& f) {
      for (int i = thread; i < keys * values; i += kThreads) {
        const bool along_keys = stride.key == 1;
        const int key = along_keys ? i % keys : i / values;
        const int value = along_keys ? i / keys : i % values;
        f(state[key * kColumns + value], stride.at(item.sequence, item.head) + key * stride.key +
                                             (first_value + value) * stride.value);
      }
    };
    __syncthreads();
    for (int i = thread; i < keys * kColumns; i += kThreads) state[i] = 0;
    __syncthreads();
    if (p.initial_state != nullptr)
      for_state(p.initial_stride, [&](float& x, std::int64_t at) { x = p.initial_state[at]; });

    for (std::int64_t begin = item.begin; begin < item.end; begin += p.d.chunk) {
      const std::int64_t left = item.end - begin;
      const ExactChunk c{begin, left < p.d.chunk ? static_cast<int>(left) : p.d.chunk};
      const auto at = [&](const TokenStrides& stride, std::int64_t head) {
        return stride.at(item.row, begin, head);
      };
      const X* q = static_cast<const X*>(p.q) + at(p.q_stride, item.key_head);
      const X* k = static_cast<const X*>(p.k) + at(p.k_stride, item.key_head);
      const X* v = static_cast<const X*>(p.v) + at(p.v_stride, item.head) + first_value;
      X* o = static_cast<X*>(p.o) + at(p.o_stride, item.head) + first_value;
      read_gates(p, item, c, q, k, s);
      const auto key = [&](int row, int i) {
        const float x = raw(s, k, p.k_stride.token, row, i);
        return p.d.qk_l2norm ? x * s.k_inverse[row] : x;
      };
      const auto query = [&](int row, int i) {
        const float x = raw(s, q, p.q_stride.token, row, i);
        return (p.d.qk_l2norm ? x * s.q_inverse[row] : x) * p.scale;
      };

      float kk[kTile][kTile] = {}, qk[kTile][kTile] = {};
      float ks[kTile][kWidth] = {}, sums[kTile][kWidth] = {};  // k S; q S, then o
      for (int slab = 0; slab < keys; slab += kSlab) {
        __syncthreads();
        for (int i = thread; i < kMostRows * kSlab; i += kThreads) {
          const int row = i / kSlab, m = i % kSlab;
          if (slab + m >= keys) continue;
          s.slab.k[m][row] = key(row, slab + m);
          s.slab.q[m][row] = query(row, slab + m);
        }
        __syncthreads();
        for (int m = 0; m < min(kSlab, keys - slab); ++m) {
          const float* of_s = state + (slab + m) * kColumns + column;
#pragma unroll
          for (int r = 0; r < kTile; ++r) {
            const float of_k = s.slab.k[m][first + r], of_q = s.slab.q[m][first + r];
#pragma unroll
            for (int e = 0; e < kTile; ++e) {
              const float other = s.slab.k[m][thread % kSide * kTile + e];
              kk[r][e] = std::fma(of_k, other, kk[r][e]);
              qk[r][e] = std::fma(of_q, other, qk[r][e]);
            }
#pragma unroll
            for (int e = 0; e < kWidth; ++e) {
              ks[r][e] = std::fma(of_k, of_s[e], ks[r][e]);
              sums[r][e] = std::fma(of_q, of_s[e], sums[r][e]);
            }
          }
        }
      }
      float below[kTile][kWidth] = {};  // the sum in y
#pragma unroll
      for (int r = 0; r < kTile; ++r) {
        const int i = first + r;
        if (i >= c.rows) continue;
#pragma unroll
        for (int e = 0; e < kTile; ++e) {
          const int j = thread % kSide * kTile + e;
          if (j > i) continue;
          const float decay = gdn_decay(s.sum[i], s.sum[j]);
          s.of.l[j][i] = s.beta[i] * kk[r][e] * decay;
          s.of.p[j][i] = qk[r][e] * decay;
        }
        const float decay = gdn_decay(s.sum[i]);
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          const bool there = !s.masked[i] && column + e < values;
          const float x = there ? cuda::load_math(v[i * p.v_stride.token + column + e]) : 0.0f;
          ks[r][e] = s.beta[i] * std::fma(-decay, ks[r][e], x);
          sums[r][e] = decay * sums[r][e];
        }
      }
      __syncthreads();
      // Row by row: y is told to all, who add its part of their rows.
      for (int j = 0; j < c.rows; ++j) {
#pragma unroll
        for (int r = 0; r < kTile; ++r) {
          if (first + r != j) continue;
#pragma unroll
          for (int e = 0; e < kWidth; ++e) s.y[j][column + e] = ks[r][e] - below[r][e];
        }
        __syncthreads();
#pragma unroll
        for (int r = 0; r < kTile; ++r) {
          const int i = first + r;
          if (i < j || i >= c.rows) continue;
#pragma unroll
          for (int e = 0; e < kWidth; ++e) {
            const float y = s.y[j][column + e];
            if (i > j) below[r][e] = std::fma(s.of.l[j][i], y, below[r][e]);
            sums[r][e] = std::fma(s.of.p[j][i], y, sums[r][e]);
          }
        }
      }
      __syncthreads();
#pragma unroll
      for (int r = 0; r < kTile; ++r) {
        const int i = first + r;
        if (i >= c.rows) continue;
        const float rest = gdn_decay(s.sum[c.rows - 1], s.sum[i]);
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          s.y[i][column + e] = rest * s.y[i][column + e];
          if (column + e < values)
            o[i * p.o_stride.token + column + e] =
                cuda::store_math<X>(s.masked[i] ? 0.0f : sums[r][e]);
        }
      }
      const float decay = gdn_decay(s.sum[c.rows - 1]);
      for (int slab = 0; slab < keys; slab += kMostRows) {
        __syncthreads();
        for (int i = thread; i < kMostRows * kMostRows; i += kThreads) {
          const int row = i / kMostRows, m = i % kMostRows;
          if (slab + m < keys) s.k[row][m] = key(row, slab + m);
        }
        __syncthreads();
        exact::add_to_state<kMostRows, kColumns, kWidth>(state + slab * kColumns, keys - slab,
                                                         decay, &s.k[0][0], &s.y[0][0], c.rows);
      }
      __syncthreads();
    }
    __syncthreads();
    if (p.final_state != nullptr)
      for_state(p.final_stride, [&](const float& x, std::int64_t at) { p.final_state[at] = x; });
  }
}

template <class X, int kWidth>
Status run_exact(const Op::Desc& d, const Op::Args& a, Stream stream) {
  using Shared = ExactShared<kWidth>;
  const Problem p(d, a, (d.value_dim + Shared::kColumns - 1) / Shared::kColumns);
  const std::size_t state = static_cast<std::size_t>(d.key_dim) * Shared::kColumns * sizeof(float);
  return cuda::launch(Op::kName, chunk_exact<X, kWidth>,
                      {.blocks = p.items, .threads = kThreads, .shared = sizeof(Shared) + state},
                      a.o.device.index, stream, p);
}

// 80 KiB of shared memory at most: long keys have fewer columns.
template <class X>
Status run_exact(const Op::Desc& d, const Op::Args& a, Stream stream) {
  return d.key_dim > 128 ? run_exact<X, 2>(d, a, stream) : run_exact<X, 4>(d, a, stream);
}

}  // namespace bittern::chunk_forward
