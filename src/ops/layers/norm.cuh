// What the kernels of gated_rms_norm and its backward share: rows, and dot products over them in
// core/dot.h's order, whose 16 chains of every 16th element decide who adds what.
#pragma once
#include "bittern/norm_desc.h"
#include "core/dot.h"
#include "cuda/packs.cuh"

namespace bittern::cuda {

__device__ inline float norm_rstd(float squares, float dim, float eps) {
  return 1.0f / sqrtf(squares / dim + eps);
}

// ---- rows of kDim elements, eight to a warp ----

constexpr int kNormRows = 8;
constexpr int kNormWarps = 4;
constexpr int kNormThreads = 32 * kNormWarps;

// Lane l holds elements [l * kElements, (l + 1) * kElements) of each of the rows: coalesced. Where
// rows are summed, they lie in shared memory as f32, and lane l adds chains 4 (l % 4) .. + 3 of row
// l / 4.
template <int kDim>
struct NormTile {
  static constexpr int kElements = kDim / 32;
  static_assert(kElements % 4 == 0);
  // Lanes 0..3 and 4..7, which read at once, meet different banks.
  float row[kNormRows][kDim + 16];

  __device__ void put(int r, int lane, const float (&values)[kElements]) {
#pragma unroll
    for (int i = 0; i < kElements; i += 4) {
      reinterpret_cast<float4&>(row[r][lane * kElements + i]) =
          make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]);
    }
  }
  __device__ void get(int r, int lane, float (&values)[kElements]) const {
#pragma unroll
    for (int i = 0; i < kElements; i += 4)
      four(row[r] + lane * kElements + i, reinterpret_cast<float(&)[4]>(values[i]));
  }
  __device__ static void four(const float* from, float (&to)[4]) {
    reinterpret_cast<float4&>(to) = reinterpret_cast<const float4&>(*from);
  }

  // The dot product of row lane / 4, known to its four lanes. terms(column, a, b) gives four
  // neighbouring pairs.
  template <class Terms>
  __device__ static float dot(int lane, const Terms& terms) {
    float sum[4] = {};
#pragma unroll
    for (int k = 0; k < kDim; k += kDotLanes) {
      float a[4], b[4];
      terms(k + 4 * (lane % 4), a, b);
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i] = fmaf(a[i], b[i], sum[i]);
    }
    // Chains 8 and 4 away are those of the lanes 2 and 1 away.
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] += __shfl_xor_sync(~0u, sum[i], 2);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] += __shfl_xor_sync(~0u, sum[i], 1);
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
  }
};

// May a warp's lanes read and write these rows as packs?
template <class X, int kDim, class... Views>
bool norm_packs(const GatedNormDesc& d, const Views&... views) {
  constexpr int N = NormTile<kDim>::kElements;
  return d.dim == kDim && (... && packs_aligned<X, N>(views.data, views.shape.rank > 1 ? d.rows : 1,
                                                      views.row_stride()));
}

// ---- any rows: sixteen lanes to a row, a chain each ----

constexpr int kRowsThreads = 128;
constexpr int kRowsPerBlock = kRowsThreads / static_cast<int>(kDotLanes);

// Every lane of the warp must call it. pair(j) holds the factors of element j.
template <class Pair>
__device__ inline float row_dot(std::int64_t dim, int lane, const Pair& pair) {
  float sum = 0;
  for (std::int64_t j = lane; j < dim; j += kDotLanes) {
    const float2 terms = pair(j);
    sum = fmaf(terms.x, terms.y, sum);
  }
#pragma unroll
  for (int stride = kDotLanes / 2; stride > 0; stride /= 2)
    sum += __shfl_xor_sync(~0u, sum, stride);
  return sum;
}

}  // namespace bittern::cuda
