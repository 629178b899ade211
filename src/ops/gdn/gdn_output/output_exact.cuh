// The header's sums as they stand, fma by fma: the bits of `ref`.
//
// A block has a chunk of one value head, and kMostRows of its values at a time.
#pragma once
#include "ops/gdn/exact_tiles.cuh"
#include "ops/gdn/gdn.h"
#include "ops/gdn/gdn_output/output_device.cuh"

namespace bittern::output {

struct ExactShared {
  exact::Slabs slabs;
  union {
    float h[exact::kSlab][exact::kPitch];  // keys, values
    float v[kMostRows][exact::kPitch];     // tokens, values
  };
  float p[kMostRows][exact::kPitch];  // transposed
  float g[kMostRows];
};

template <class X>
__global__ void __launch_bounds__(exact::kThreads) output_exact(const Problem p) {
  using namespace exact;
  auto& s = *cuda::dynamic_shared<ExactShared>();
  const int thread = static_cast<int>(threadIdx.x), row = first_row(), column = first_column();
  const int keys = static_cast<int>(p.d.key_dim), values = static_cast<int>(p.d.value_dim);
  const std::int64_t heads = p.d.value_heads, key_stride = p.d.key_heads * p.d.key_dim;
  const bool key_first = p.d.state_layout == StateLayout::key_value;
  for (std::int64_t index = blockIdx.x; index < p.items; index += gridDim.x) {
    const Problem::Item item = p.item(index);
    const int rows = item.chunk.rows;
    if (rows == 0) continue;
    const X* q = static_cast<const X*>(p.q) + item.key_at;
    const X* k = static_cast<const X*>(p.k) + item.key_at;
    const X* h = static_cast<const X*>(p.h) + item.state_at;
    __syncthreads();
    if (thread < rows) s.g[thread] = p.g[item.first + thread * heads];
    float qk[kTile][kTile] = {};
    multiply_rows(qk, s.slabs, q, k, key_stride, rows, keys);
#pragma unroll
    for (int r = 0; r < kTile; ++r) {
      const int i = row + r;
#pragma unroll
      for (int e = 0; e < kTile; ++e) {
        const int j = column + e;
        if (j > i || i >= rows) continue;
        s.p[j][i] = cuda::load_math(cuda::store_math<X>(qk[r][e] * gdn_decay(s.g[i], s.g[j])));
      }
    }
    for (int part = 0; part < values; part += kMostRows) {
      float sums[kTile][kTile] = {};
      for (int slab = 0; slab < keys; slab += kSlab) {
        __syncthreads();
        load_transposed(s.slabs.x, q, key_stride, rows, slab, keys);
        for (int i = thread; i < kSlab * kMostRows; i += kThreads) {
          const int m = key_first ? i / kMostRows : i % kSlab;
          const int c = key_first ? i % kMostRows : i / kSlab;
          const bool there = slab + m < keys && part + c < values;
          const int place_in_h =
              key_first ? (slab + m) * values + part + c : (part + c) * keys + slab + m;
          s.h[m][c] = there ? cuda::load_math(h[place_in_h]) : 0.0f;
        }
        __syncthreads();
        add_products<kPitch, kPitch>(sums, &s.slabs.x[0][0], &s.h[0][0], min(kSlab, keys - slab));
      }
      __syncthreads();
      for (int i = thread; i < rows * kMostRows; i += kThreads) {
        const int j = i / kMostRows, c = i % kMostRows;
        if (part + c < values)
          s.v[j][c] = cuda::load_math(
              static_cast<const X*>(p.v_new)[(item.first + j * heads) * values + part + c]);
      }
      __syncthreads();
#pragma unroll
      for (int r = 0; r < kTile; ++r) {
        const int i = row + r;
        if (i >= rows) continue;
        const float decay = math::exp(s.g[i]);
#pragma unroll
        for (int e = 0; e < kTile; ++e) {
          const int c = part + column + e;
          if (c >= values) continue;
          float acc = decay * sums[r][e];
          for (int j = 0; j <= i; ++j) acc = std::fma(s.p[j][i], s.v[j][column + e], acc);
          static_cast<X*>(p.o)[(item.first + i * heads) * values + c] =
              cuda::store_math<X>(p.scale * acc);
        }
      }
    }
  }
}

template <class X>
Status run_exact(const Op::Desc& d, const Op::Args& a, Stream stream) {
  const Problem p(d, a);
  return cuda::launch(
      Op::kName, output_exact<X>,
      {.blocks = p.items, .threads = exact::kThreads, .shared = sizeof(ExactShared)},
      a.o.device.index, stream, p);
}

}  // namespace bittern::output
