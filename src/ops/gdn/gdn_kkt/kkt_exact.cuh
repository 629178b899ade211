// The header's sums as they stand, fma by fma: the bits of `ref`.
#pragma once
#include "ops/gdn/exact_tiles.cuh"
#include "ops/gdn/gdn.h"
#include "ops/gdn/gdn_kkt/kkt_device.cuh"

namespace bittern::kkt {

struct ExactShared {
  exact::Slabs slabs;
  float beta[kMostRows], g[kMostRows];
};

template <class X>
__global__ void __launch_bounds__(exact::kThreads) kkt_exact(const Problem p) {
  using namespace exact;
  auto& s = *cuda::dynamic_shared<ExactShared>();
  const int thread = static_cast<int>(threadIdx.x), row = first_row(), column = first_column();
  for (std::int64_t index = blockIdx.x; index < p.items; index += gridDim.x) {
    const Problem::Item item = p.item(index);
    const int rows = item.chunk.rows;
    if (rows == 0) continue;
    const X* k = static_cast<const X*>(p.k) + p.keys_at(item);
    float kk[kTile][kTile] = {};
    multiply_rows(kk, s.slabs, k, k, p.d.key_heads * p.d.key_dim, rows,
                  static_cast<int>(p.d.key_dim));
    for (std::int64_t i = 0; i < p.d.value_heads / p.d.key_heads; ++i) {
      const std::int64_t first = p.gates_at(item, i);
      __syncthreads();
      if (thread < rows) {
        s.beta[thread] = p.beta[first + thread * p.d.value_heads];
        s.g[thread] = p.g[first + thread * p.d.value_heads];
      }
      __syncthreads();
      if (column >= p.d.chunk) continue;
#pragma unroll
      for (int r = 0; r < kTile; ++r) {
        const int m = row + r;
        if (m >= rows) continue;
        float* to = p.l + (first + m * p.d.value_heads) * p.d.chunk + column;
#pragma unroll
        for (int e = 0; e < kTile; ++e)
          to[e] = column + e < m ? s.beta[m] * kk[r][e] * gdn_decay(s.g[m], s.g[column + e]) : 0.0f;
      }
    }
  }
}

template <class X>
Status run_exact(const Op::Desc& d, const Op::Args& a, Stream stream) {
  const Problem p(d, a);
  return cuda::launch(
      Op::kName, kkt_exact<X>,
      {.blocks = p.items, .threads = exact::kThreads, .shared = sizeof(ExactShared)},
      a.l.device.index, stream, p);
}

}  // namespace bittern::kkt
