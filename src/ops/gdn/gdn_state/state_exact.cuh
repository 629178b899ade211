// The header's sums as they stand, fma by fma: the bits of `ref`.
//
// A block has kColumns values of a head, whose state it keeps in shared memory, and goes through
// its chunks.
#pragma once
#include "ops/gdn/exact_tiles.cuh"
#include "ops/gdn/gdn.h"
#include "ops/gdn/gdn_state/state_device.cuh"

namespace bittern::state {

template <int kWidth>
struct ExactShared {
  static constexpr int kColumns = exact::kSide * kWidth;
  union {
    struct {
      float w[exact::kSlab][exact::kPitch];  // transposed
      float rounded[exact::kSlab][kColumns];
    } slab;
    float k[kMostRows][exact::kPitch];  // tokens, and some keys
  };
  float z[kMostRows][kColumns];
  float g[kMostRows];
  // Then the state, [keys][kColumns].
  __device__ float* state() { return reinterpret_cast<float*>(this + 1); }
};

template <class X, int kWidth>
__global__ void __launch_bounds__(exact::kThreads) state_exact(const Problem p) {
  using namespace exact;
  using Shared = ExactShared<kWidth>;
  constexpr int kColumns = Shared::kColumns;
  auto& s = *cuda::dynamic_shared<Shared>();
  float* const state = s.state();
  const auto round = [](float x) { return cuda::load_math(cuda::store_math<X>(x)); };
  const int thread = static_cast<int>(threadIdx.x);
  const int keys = static_cast<int>(p.d.key_dim), all_values = static_cast<int>(p.d.value_dim);
  const int row = first_row(), column = first_column<kWidth>();
  const std::int64_t heads = p.d.value_heads;
  for (std::int64_t index = blockIdx.x; index < p.items; index += gridDim.x) {
    const Problem::Item item = p.item(index);
    const int first_value = item.part * kColumns, values = min(all_values - first_value, kColumns);
    // Every element of the state and its place in a tensor, neighbours by neighbouring threads.
    const auto for_state = [&](auto&& f) {
      const bool key_first = p.d.state_layout == StateLayout::key_value;
      for (int i = thread; i < keys * values; i += kThreads) {
        const int key = key_first ? i / values : i % keys;
        const int value = key_first ? i % values : i / keys;
        f(state[key * kColumns + value],
          key_first ? key * all_values + first_value + value : (first_value + value) * keys + key);
      }
    };
    __syncthreads();
    for (int i = thread; i < keys * kColumns; i += kThreads) state[i] = 0;
    __syncthreads();
    if (p.initial_state != nullptr) {
      const float* from = p.initial_state + p.state_at(item);
      for_state([&](float& x, int at) { x = from[at]; });
    }
    for (int n = 0; n < item.chunks(p.d.chunk); ++n) {
      const std::int64_t begin = item.tokens.begin + std::int64_t{n} * p.d.chunk;
      const std::int64_t left = item.tokens.end - begin, first = begin * heads + item.head;
      const int rows = left < p.d.chunk ? static_cast<int>(left) : p.d.chunk;
      __syncthreads();
      if (const std::int64_t to = p.h_at(item, n); p.h != nullptr && to >= 0)
        for_state([&](const float& x, int at) {
          static_cast<X*>(p.h)[to + at] = cuda::store_math<X>(x);
        });
      if (thread < rows) s.g[thread] = p.g[first + thread * heads];
      float sums[kTile][kWidth] = {};  // w X(S)
      for (int slab = 0; slab < keys; slab += kSlab) {
        __syncthreads();
        load_transposed(s.slab.w, static_cast<const X*>(p.w) + first * keys, heads * keys, rows,
                        slab, keys);
        for (int i = thread; i < kSlab * kColumns; i += kThreads)
          if (slab + i / kColumns < keys)
            s.slab.rounded[i / kColumns][i % kColumns] = round(state[slab * kColumns + i]);
        __syncthreads();
        add_products<kPitch, kColumns>(sums, &s.slab.w[0][0], &s.slab.rounded[0][0],
                                       min(kSlab, keys - slab));
      }
      const float last = s.g[rows - 1];
#pragma unroll
      for (int r = 0; r < kTile; ++r) {
        const int i = row + r;
        if (i >= rows) continue;
        const float decay = gdn_decay(last, s.g[i]);
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          if (column + e >= values) continue;
          const std::int64_t at = (first + i * heads) * all_values + first_value + column + e;
          const float y = cuda::load_math(static_cast<const X*>(p.u)[at]) - sums[r][e];
          if (p.v_new != nullptr) static_cast<X*>(p.v_new)[at] = cuda::store_math<X>(y);
          s.z[i][column + e] = round(y * decay);
        }
      }
      const float decay = math::exp(last);
      const X* const k =
          static_cast<const X*>(p.k) + (begin * p.d.key_heads + item.key_head) * keys;
      for (int slab = 0; slab < keys; slab += kMostRows) {
        __syncthreads();
        for (int i = thread; i < rows * kMostRows; i += kThreads)
          if (const int m = slab + i % kMostRows; m < keys)
            s.k[i / kMostRows][i % kMostRows] =
                cuda::load_math(k[i / kMostRows * p.d.key_heads * keys + m]);
        __syncthreads();
        add_to_state<kPitch, kColumns, kWidth>(state + slab * kColumns, keys - slab, decay,
                                               &s.k[0][0], &s.z[0][0], rows);
      }
    }
    __syncthreads();
    if (p.final_state != nullptr) {
      float* const to = p.final_state + p.state_at(item);
      for_state([&](const float& x, int at) { to[at] = x; });
    }
  }
}

template <class X, int kWidth>
Status run_exact(const Op::Desc& d, const Op::Args& a, Stream stream) {
  using Shared = ExactShared<kWidth>;
  const Problem p(d, a, (d.value_dim + Shared::kColumns - 1) / Shared::kColumns);
  const std::size_t state = static_cast<std::size_t>(d.key_dim) * Shared::kColumns * sizeof(float);
  return cuda::launch(
      Op::kName, state_exact<X, kWidth>,
      {.blocks = p.items, .threads = exact::kThreads, .shared = sizeof(Shared) + state},
      a.k.device.index, stream, p);
}

// 80 KiB of shared memory at most: long keys have fewer columns.
template <class X>
Status run_exact(const Op::Desc& d, const Op::Args& a, Stream stream) {
  return d.key_dim > 128 ? run_exact<X, 2>(d, a, stream) : run_exact<X, 4>(d, a, stream);
}

}  // namespace bittern::state
