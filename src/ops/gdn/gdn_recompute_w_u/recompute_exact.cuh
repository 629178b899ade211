// The header's sums as they stand, fma by fma, on registers: the bits of `ref`.
#pragma once
#include "core/math.h"
#include "ops/gdn/gdn_recompute_w_u/recompute_device.cuh"

namespace bittern::recompute {

// A thread has 8 rows and 2 x 4 columns of a slab of kSlab columns: thread t has rows 8 (t / 16)..
// and columns 4 (t % 16).. and 64 + 4 (t % 16)..
constexpr int kTileRows = 8, kSlab = 128, kHalf = kSlab / 2;
constexpr int kMatrixPitch = kMostRows + 4;  // floats: rows of A start in different banks

struct ExactShared {
  float a[kMostRows * kMatrixPitch];
  float b[kMostRows * kSlab];
  float beta[kMostRows], decay[kMostRows];
};

template <class X, class M>
__global__ void __launch_bounds__(kThreads) recompute(const Problem p) {
  auto& s = *cuda::dynamic_shared<ExactShared>();
  const int first_row = static_cast<int>(threadIdx.x) / 16 * kTileRows;
  const int first_column = static_cast<int>(threadIdx.x) % 16 * 4;
  for (std::int64_t index = blockIdx.x; index < p.items; index += gridDim.x) {
    const Problem::Item item = p.item(index);
    const int rows = item.chunk.rows, chunk = p.slots.chunk;
    const std::int64_t first = item.value_row;
    __syncthreads();
    const int column = static_cast<int>(threadIdx.x) % chunk;
    for (int i = static_cast<int>(threadIdx.x) / chunk; i < rows; i += kThreads / chunk) {
      if (column >= p.terms(i, rows)) continue;
      const auto* a = static_cast<const M*>(p.a) + (first + i * p.value_heads) * chunk;
      s.a[i * kMatrixPitch + column] = cuda::load_math(a[column]);
    }
    if (static_cast<int>(threadIdx.x) < rows) {
      const std::int64_t at = first + threadIdx.x * p.value_heads;
      s.beta[threadIdx.x] = p.beta[at];
      s.decay[threadIdx.x] = math::exp(p.g[at]);
    }
    int terms[kTileRows], most = 0;
#pragma unroll
    for (int r = 0; r < kTileRows; ++r) {
      terms[r] = p.terms(first_row + r, rows);
      most = max(most, terms[r]);
    }
    // X(A b) for the `width` columns of b = scaled(j, x), x being row j of `from`.
    const auto product = [&](const X* from, std::int64_t stride, int width, X* to, auto&& scale) {
      for (int slab = 0; slab < width; slab += kSlab) {
        __syncthreads();
        const int mine = slab + static_cast<int>(threadIdx.x);
        if (mine < width) {
          for (int j = 0; j < rows; ++j)
            s.b[j * kSlab + threadIdx.x] = scale(j, from[j * stride + mine]);
        }
        __syncthreads();
        float acc[kTileRows][8] = {};
        for (int j0 = 0; j0 < most; j0 += 4) {
          float4 a[kTileRows];
#pragma unroll
          for (int r = 0; r < kTileRows; ++r)
            a[r] = *reinterpret_cast<const float4*>(&s.a[(first_row + r) * kMatrixPitch + j0]);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float* row = s.b + (j0 + e) * kSlab + first_column;
            const float4 low = *reinterpret_cast<const float4*>(row);
            const float4 high = *reinterpret_cast<const float4*>(row + kHalf);
            const float b[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int r = 0; r < kTileRows; ++r) {
              if (j0 + e >= terms[r]) continue;
              const float factor = e == 0 ? a[r].x : e == 1 ? a[r].y : e == 2 ? a[r].z : a[r].w;
#pragma unroll
              for (int c = 0; c < 8; ++c) acc[r][c] = std::fma(factor, b[c], acc[r][c]);
            }
          }
        }
        // Through shared memory, so that rows are written whole.
        __syncthreads();
#pragma unroll
        for (int r = 0; r < kTileRows; ++r) {
          float* row = s.b + (first_row + r) * kSlab + first_column;
          *reinterpret_cast<float4*>(row) = make_float4(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
          *reinterpret_cast<float4*>(row + kHalf) =
              make_float4(acc[r][4], acc[r][5], acc[r][6], acc[r][7]);
        }
        __syncthreads();
        if (mine < width) {
          for (int i = 0; i < rows; ++i)
            to[(first + i * p.value_heads) * width + mine] =
                cuda::store_math<X>(s.b[i * kSlab + threadIdx.x]);
        }
      }
    };
    if (rows == 0) continue;
    if (p.u != nullptr) {
      product(static_cast<const X*>(p.v) + first * p.value_dim, p.value_heads * p.value_dim,
              p.value_dim, static_cast<X*>(p.u),
              [&](int j, X x) { return scaled(x, s.beta[j], 1.0f); });
    }
    if (p.w != nullptr) {
      product(static_cast<const X*>(p.k) + item.key_row * p.key_dim, p.key_heads * p.key_dim,
              p.key_dim, static_cast<X*>(p.w),
              [&](int j, X x) { return scaled(x, s.beta[j], s.decay[j]); });
    }
  }
}

template <class X, class M>
Status run_exact(const Op::Desc& d, const Op::Args& a, Stream stream) {
  const Problem p(d, a);
  return cuda::launch(Op::kName, recompute<X, M>,
                      {.blocks = p.items, .threads = kThreads, .shared = sizeof(ExactShared)},
                      a.k.device.index, stream, p);
}

}  // namespace bittern::recompute
