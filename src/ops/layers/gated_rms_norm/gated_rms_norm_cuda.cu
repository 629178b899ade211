#include "bittern/ops/gated_rms_norm.h"
#include "cuda/runtime.cuh"
#include "cuda/silu.cuh"
#include "ops/layers/norm.cuh"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = GatedRmsNorm;
using cuda::kNormRows;
using cuda::Raw;

struct Problem {
  const void *x, *z, *weight;
  void* y;
  std::int64_t rows, dim, x_stride, z_stride, y_stride;
  float eps;
};

// The norm and its weight, before the gate.
template <class X, bool kEach>
__device__ inline float weighted(float x, float rstd, float weight) {
  const auto rounded = [](float v) { return kEach ? cuda::load_math(cuda::store_math<X>(v)) : v; };
  return rounded(rounded(x * rstd) * weight);
}

// A warp takes eight rows.
template <class X, bool kEach, int kDim>
__global__ void __launch_bounds__(cuda::kNormThreads) normalise_tiles(const Problem p) {
  using Tile = cuda::NormTile<kDim>;
  constexpr int N = Tile::kElements;
  constexpr int kAtOnce = 2;  // rows gated together
  Tile& tile = cuda::dynamic_shared<Tile>()[threadIdx.x / 32];
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::int64_t first =
      (std::int64_t{blockIdx.x} * cuda::kNormWarps + threadIdx.x / 32) * kNormRows;
  if (first >= p.rows) return;
  const auto count = static_cast<int>(p.rows - first < kNormRows ? p.rows - first : kNormRows);

  const X* x_row = static_cast<const X*>(p.x) + first * p.x_stride + lane * N;
  const X* z_row = static_cast<const X*>(p.z) + first * p.z_stride + lane * N;
  Raw<X, N> x[kNormRows], z[kNormRows];
#pragma unroll
  for (int r = 0; r < kNormRows; ++r) {
    x[r] = Raw<X, N>::load(x_row, r < count);
    z[r] = Raw<X, N>::load(z_row, r < count);
    x_row += p.x_stride;
    z_row += p.z_stride;
  }
  float weight[N];
  Raw<X, N>::template load<true>(static_cast<const X*>(p.weight) + lane * N).widen(weight);

#pragma unroll
  for (int r = 0; r < kNormRows; ++r) {
    float values[N];
    x[r].widen(values);
    tile.put(r, lane, values);
  }
  __syncwarp();
  const float squares = Tile::dot(lane, [&](int column, float(&a)[4], float(&b)[4]) {
    Tile::four(tile.row[lane / 4] + column, a);
    Tile::four(tile.row[lane / 4] + column, b);
  });
  const float rstd = cuda::norm_rstd(squares, kDim, p.eps);

  X* y = static_cast<X*>(p.y) + first * p.y_stride + lane * N;
#pragma unroll
  for (int r = 0; r < kNormRows; r += kAtOnce) {
    float gate[kAtOnce * N], out[kAtOnce * N];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const float rstd_of_row = __shfl_sync(~0u, rstd, 4 * (r + k));
#pragma unroll
      for (int i = 0; i < N; ++i) {
        out[k * N + i] = weighted<X, kEach>(x[r + k][i], rstd_of_row, weight[i]);
        gate[k * N + i] = z[r + k][i];
      }
    }
    cuda::with_silu<X, true>(gate, out);
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      float part[N];
#pragma unroll
      for (int i = 0; i < N; ++i) part[i] = out[k * N + i];
      if (r + k < count) Raw<X, N>::narrow(part).store(y);
      y += p.y_stride;
    }
  }
}

// Sixteen lanes take a row, of any length, at any address.
template <class X, bool kEach>
__global__ void __launch_bounds__(cuda::kRowsThreads) normalise_rows(const Problem p) {
  const int lane = static_cast<int>(threadIdx.x % kDotLanes);
  for (std::int64_t first = std::int64_t{blockIdx.x} * cuda::kRowsPerBlock; first < p.rows;
       first += std::int64_t{gridDim.x} * cuda::kRowsPerBlock) {
    const std::int64_t row = first + threadIdx.x / kDotLanes;
    const std::int64_t dim = row < p.rows ? p.dim : 0;  // warps stay together
    const X* x = static_cast<const X*>(p.x) + row * p.x_stride;
    const X* z = static_cast<const X*>(p.z) + row * p.z_stride;
    X* y = static_cast<X*>(p.y) + row * p.y_stride;
    const float squares = cuda::row_dot(dim, lane, [&](std::int64_t j) {
      const float v = cuda::load_math(x[j]);
      return make_float2(v, v);
    });
    const float rstd = cuda::norm_rstd(squares, static_cast<float>(p.dim), p.eps);
    for (std::int64_t j = lane; j < dim; j += kDotLanes) {
      const float weight = cuda::load_math(static_cast<const X*>(p.weight)[j]);
      const float gate[1] = {cuda::load_math(z[j])};
      float out[1] = {weighted<X, kEach>(cuda::load_math(x[j]), rstd, weight)};
      cuda::with_silu<X, true>(gate, out);
      y[j] = cuda::store_math<X>(out[0]);
    }
  }
}

template <class X, bool kEach>
Status run_rounded(const Op::Desc& d, const Op::Args& a, Stream stream) {
  const Problem p{.x = a.x.data,
                  .z = a.z.data,
                  .weight = a.weight.data,
                  .y = a.y.data,
                  .rows = d.rows,
                  .dim = d.dim,
                  .x_stride = a.x.row_stride(),
                  .z_stride = a.z.row_stride(),
                  .y_stride = a.y.row_stride(),
                  .eps = static_cast<float>(d.eps)};
  const int device = a.x.device.index;
  const auto tiles = [&]<int kDim>(std::integral_constant<int, kDim>) {
    const std::int64_t warps = (d.rows + kNormRows - 1) / kNormRows;
    const cuda::Grid grid{.blocks = (warps + cuda::kNormWarps - 1) / cuda::kNormWarps,
                          .threads = cuda::kNormThreads,
                          .shared = cuda::kNormWarps * sizeof(cuda::NormTile<kDim>)};
    return cuda::launch(Op::kName, normalise_tiles<X, kEach, kDim>, grid, device, stream, p);
  };
  if (cuda::norm_packs<X, 128>(d, a.x, a.z, a.weight, a.y))
    return tiles(std::integral_constant<int, 128>());
  if constexpr (sizeof(X) == 2) {
    if (cuda::norm_packs<X, 256>(d, a.x, a.z, a.weight, a.y))
      return tiles(std::integral_constant<int, 256>());
  }
  const cuda::Grid grid{.blocks = (d.rows + cuda::kRowsPerBlock - 1) / cuda::kRowsPerBlock,
                        .threads = cuda::kRowsThreads};
  return cuda::launch(Op::kName, normalise_rows<X, kEach>, grid, device, stream, p);
}

Status run(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace) {
  return visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    if constexpr (sizeof(X) == 2) {
      if (d.rounding == NormRounding::each) return run_rounded<X, true>(d, a, stream);
    }
    return run_rounded<X, false>(d, a, stream);
  });
}

constexpr Kernel<Op> kKernels[] = {cuda::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<GatedRmsNorm>> gated_rms_norm_cuda() { return kKernels; }

}  // namespace bittern
