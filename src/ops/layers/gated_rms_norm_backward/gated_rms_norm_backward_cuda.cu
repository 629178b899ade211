#include "bittern/ops/gated_rms_norm_backward.h"
#include "cuda/runtime.cuh"
#include "cuda/silu.cuh"
#include "cuda/tree_rows.cuh"
#include "ops/layers/norm.cuh"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = GatedRmsNormBackward;
using cuda::kNormRows;
using cuda::Raw;

constexpr std::int64_t kBlockRows = Op::Desc::kBlock;
constexpr int kDim = 128;  // rows of other lengths go the general way
using Tile = cuda::NormTile<kDim>;

struct Problem {
  const void *x, *z, *weight, *d_y;
  void *d_x, *d_z;
  float* partial;  // [blocks, dim]: d_weight of each block of rows; null: not wanted
  float* rstd;     // [rows], for kernels that go over the rows twice
  std::int64_t rows, dim, blocks, x_stride, z_stride, d_y_stride, d_x_stride, d_z_stride;
  float eps;
};

// The header's letters, of one element.
struct Element {
  float n, h, e, d_z;

  __device__ Element(float x, float z, float d_y, float weight, float rstd) {
    const float s = cuda::sigmoid(z);
    n = x * rstd;
    h = d_y * (z * s);
    e = h * weight;
    d_z = (d_y * (n * weight)) * math::silu_slope(z, s);
  }
};
__device__ inline float d_x_of(float n, float e, float along, float rstd) {
  return rstd * fmaf(-n, along, e);
}

// A warp takes a block of 64 rows, eight at a time; lanes hold columns, as NormTile says, and the
// sums of d_weight over them.
template <class X>
__global__ void __launch_bounds__(cuda::kNormThreads, sizeof(X) == 2 ? 4 : 2)
    differentiate_tiles(const Problem p) {
  constexpr int N = Tile::kElements;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  Tile& x_tile = cuda::dynamic_shared<Tile>()[2 * warp];
  Tile& e_tile = cuda::dynamic_shared<Tile>()[2 * warp + 1];
  const std::int64_t block = std::int64_t{blockIdx.x} * cuda::kNormWarps + warp;
  if (block >= p.blocks) return;
  const std::int64_t end = (block + 1) * kBlockRows < p.rows ? (block + 1) * kBlockRows : p.rows;

  float weight[N], sums[N] = {};
  Raw<X, N>::template load<true>(static_cast<const X*>(p.weight) + lane * N).widen(weight);
  for (std::int64_t first = block * kBlockRows; first < end; first += kNormRows) {
    const auto count = static_cast<int>(end - first < kNormRows ? end - first : kNormRows);
    const X* x_row = static_cast<const X*>(p.x) + first * p.x_stride + lane * N;
    const X* z_row = static_cast<const X*>(p.z) + first * p.z_stride + lane * N;
    const X* d_y_row = static_cast<const X*>(p.d_y) + first * p.d_y_stride + lane * N;
    Raw<X, N> x[kNormRows], z[kNormRows], d_y[kNormRows];
#pragma unroll
    for (int r = 0; r < kNormRows; ++r) {
      x[r] = Raw<X, N>::load(x_row, r < count);
      z[r] = Raw<X, N>::load(z_row, r < count);
      d_y[r] = Raw<X, N>::load(d_y_row, r < count);
      x_row += p.x_stride;
      z_row += p.z_stride;
      d_y_row += p.d_y_stride;
    }
#pragma unroll
    for (int r = 0; r < kNormRows; ++r) {
      float values[N];
      x[r].widen(values);
      x_tile.put(r, lane, values);
    }
    __syncwarp();
    const float* x_mine = x_tile.row[lane / 4];
    const float* e_mine = e_tile.row[lane / 4];
    const float squares = Tile::dot(lane, [&](int column, float(&a)[4], float(&b)[4]) {
      Tile::four(x_mine + column, a);
      Tile::four(x_mine + column, b);
    });
    const float rstd = cuda::norm_rstd(squares, kDim, p.eps);

    X* d_z_row = static_cast<X*>(p.d_z) + first * p.d_z_stride + lane * N;
#pragma unroll
    for (int r = 0; r < kNormRows; ++r) {
      if (r >= count) break;
      const float rstd_of_row = __shfl_sync(~0u, rstd, 4 * r);
      float e[N], d_z[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const Element element(x[r][i], z[r][i], d_y[r][i], weight[i], rstd_of_row);
        sums[i] = fmaf(element.h, element.n, sums[i]);
        e[i] = element.e;
        d_z[i] = element.d_z;
      }
      e_tile.put(r, lane, e);
      if (p.d_z != nullptr) Raw<X, N>::narrow(d_z).store(d_z_row);
      d_z_row += p.d_z_stride;
    }
    __syncwarp();
    if (p.d_x == nullptr) continue;
    const float sum = Tile::dot(lane, [&](int column, float(&a)[4], float(&b)[4]) {
      Tile::four(e_mine + column, a);
      Tile::four(x_mine + column, b);
#pragma unroll
      for (int i = 0; i < 4; ++i) b[i] *= rstd;
    });
    const float along = sum / kDim;
    X* d_x_row = static_cast<X*>(p.d_x) + first * p.d_x_stride + lane * N;
#pragma unroll
    for (int r = 0; r < kNormRows; ++r) {
      if (r >= count) break;
      const float rstd_of_row = __shfl_sync(~0u, rstd, 4 * r);
      const float along_row = __shfl_sync(~0u, along, 4 * r);
      float e[N], d_x[N];
      e_tile.get(r, lane, e);
#pragma unroll
      for (int i = 0; i < N; ++i)
        d_x[i] = d_x_of(x[r][i] * rstd_of_row, e[i], along_row, rstd_of_row);
      Raw<X, N>::narrow(d_x).store(d_x_row);
      d_x_row += p.d_x_stride;
    }
    __syncwarp();
  }
  if (p.partial == nullptr) return;
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    reinterpret_cast<float4&>(p.partial[block * kDim + lane * N + i]) =
        make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]);
  }
}

template <class X>
struct Row {
  const X *x, *z, *d_y, *weight;

  __device__ Row(const Problem& p, std::int64_t row)
      : x(static_cast<const X*>(p.x) + row * p.x_stride),
        z(static_cast<const X*>(p.z) + row * p.z_stride),
        d_y(static_cast<const X*>(p.d_y) + row * p.d_y_stride),
        weight(static_cast<const X*>(p.weight)) {}
  __device__ Element element(std::int64_t j, float rstd) const {
    return {cuda::load_math(x[j]), cuda::load_math(z[j]), cuda::load_math(d_y[j]),
            cuda::load_math(weight[j]), rstd};
  }
};

// Sixteen lanes take a row, of any length, at any address.
template <class X>
__global__ void __launch_bounds__(cuda::kRowsThreads) differentiate_rows(const Problem p) {
  const int lane = static_cast<int>(threadIdx.x % kDotLanes);
  for (std::int64_t first = std::int64_t{blockIdx.x} * cuda::kRowsPerBlock; first < p.rows;
       first += std::int64_t{gridDim.x} * cuda::kRowsPerBlock) {
    const std::int64_t row = first + threadIdx.x / kDotLanes;
    const std::int64_t dim = row < p.rows ? p.dim : 0;  // warps stay together
    const Row<X> in(p, row);
    const float squares = cuda::row_dot(dim, lane, [&](std::int64_t j) {
      const float v = cuda::load_math(in.x[j]);
      return make_float2(v, v);
    });
    const float rstd = cuda::norm_rstd(squares, static_cast<float>(p.dim), p.eps);
    if (lane == 0 && dim > 0) p.rstd[row] = rstd;
    const float sum = cuda::row_dot(dim, lane, [&](std::int64_t j) {
      const Element element = in.element(j, rstd);
      if (p.d_z != nullptr)
        static_cast<X*>(p.d_z)[row * p.d_z_stride + j] = cuda::store_math<X>(element.d_z);
      return make_float2(element.e, element.n);
    });
    const float along = sum / static_cast<float>(p.dim);
    if (p.d_x == nullptr) continue;
    for (std::int64_t j = lane; j < dim; j += kDotLanes) {
      const Element element = in.element(j, rstd);
      static_cast<X*>(p.d_x)[row * p.d_x_stride + j] =
          cuda::store_math<X>(d_x_of(element.n, element.e, along, rstd));
    }
  }
}

// Thread: (block of rows, column), columns fastest.
template <class X>
__global__ void __launch_bounds__(cuda::kBlock)
    sum_blocks(const Problem p, const cuda::Divisor columns) {
  const std::int64_t threads = std::int64_t{gridDim.x} * cuda::kBlock;
  for (std::int64_t i = std::int64_t{blockIdx.x} * cuda::kBlock + threadIdx.x; i < p.blocks * p.dim;
       i += threads) {
    const std::int64_t block = columns.divide(i), j = i - block * p.dim;
    float sum = 0;
    for (std::int64_t row = block * kBlockRows; row < p.rows && row < (block + 1) * kBlockRows;
         ++row) {
      const Element element = Row<X>(p, row).element(j, p.rstd[row]);
      sum = fmaf(element.h, element.n, sum);
    }
    p.partial[i] = sum;
  }
}

template <class X>
struct WriteWeight {
  X* d_weight;
  __device__ void operator()(std::int64_t column, float sum) const {
    d_weight[column] = cuda::store_math<X>(sum);
  }
};

template <class X>
Status run_typed(const Op::Desc& d, const Op::Args& a, Stream stream, float* space) {
  const Problem p{.x = a.x.data,
                  .z = a.z.data,
                  .weight = a.weight.data,
                  .d_y = a.d_y.data,
                  .d_x = a.d_x.data,
                  .d_z = a.d_z.data,
                  .partial = a.d_weight ? space : nullptr,
                  .rstd = space + d.blocks() * d.dim,
                  .rows = d.rows,
                  .dim = d.dim,
                  .blocks = d.blocks(),
                  .x_stride = a.x.row_stride(),
                  .z_stride = a.z.row_stride(),
                  .d_y_stride = a.d_y.row_stride(),
                  .d_x_stride = a.d_x.row_stride(),
                  .d_z_stride = a.d_z.row_stride(),
                  .eps = static_cast<float>(d.eps)};
  const int device = a.x.device.index;
  if (cuda::norm_packs<X, kDim>(d, a.x, a.z, a.weight, a.d_y, a.d_x, a.d_z)) {
    const cuda::Grid grid{.blocks = (p.blocks + cuda::kNormWarps - 1) / cuda::kNormWarps,
                          .threads = cuda::kNormThreads,
                          .shared = 2 * cuda::kNormWarps * sizeof(Tile)};
    BITTERN_TRY(cuda::launch(Op::kName, differentiate_tiles<X>, grid, device, stream, p));
  } else {
    const cuda::Grid grid{.blocks = (d.rows + cuda::kRowsPerBlock - 1) / cuda::kRowsPerBlock,
                          .threads = cuda::kRowsThreads};
    BITTERN_TRY(cuda::launch(Op::kName, differentiate_rows<X>, grid, device, stream, p));
    if (a.d_weight) {
      BITTERN_TRY(cuda::launch(Op::kName, sum_blocks<X>, cuda::grid_for(p.blocks * p.dim), device,
                               stream, p, cuda::Divisor(p.dim)));
    }
  }
  if (!a.d_weight) return {};
  return cuda::sum_rows(Op::kName, {p.partial, d.dim, p.blocks, nullptr},
                        WriteWeight<X>{a.d_weight.as<X>()}, device, stream);
}

std::size_t workspace(const Op::Desc& d, Device) {
  return static_cast<std::size_t>(d.blocks() * d.dim + d.rows) * sizeof(float);
}

Status run(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace space) {
  return visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    return run_typed<X>(d, a, stream, static_cast<float*>(space.data));
  });
}

constexpr Kernel<Op> kKernels[] = {cuda::exact_kernel<Op>(run, workspace)};

}  // namespace

std::span<const Kernel<GatedRmsNormBackward>> gated_rms_norm_backward_cuda() { return kKernels; }

}  // namespace bittern
