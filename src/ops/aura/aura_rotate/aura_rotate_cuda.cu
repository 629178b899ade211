#include "bittern/ops/aura_rotate.h"
#include "ops/aura/aura_rows.cuh"
#include "ops/aura/aura_tile.cuh"
#include "ops/aura/aura_tiles.cuh"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = AuraRotate;
using cuda::lane_index;
using cuda::RowRotation;
using cuda::warp_index;

// ---- tuning ----

constexpr int kMostWarps = 12;  // of a block of rotate_by_lanes: its registers

struct Problem {
  const void* x;
  void* y;
  std::int64_t x_stride, y_stride;  // in elements
  std::int64_t rows;
  RowRotation rotation;
  DType element;

  __device__ void load(std::int64_t row, float* t) const {
    for (int j = lane_index(); j < rotation.dim; j += 32)
      t[j] = cuda::load_element(x, element, row * x_stride + j);
  }
  __device__ void store(std::int64_t row, const float* t) const {
    for (int j = lane_index(); j < rotation.dim; j += 32)
      cuda::store_element(y, element, row * y_stride + j, t[j]);
  }
};

// ---- a lane to a row ----

// Two tiles of rows in shared memory for each warp: the next ones of x, and these, which become
// those of y.
template <class Tile, class X>
__global__ void __launch_bounds__(32 * kMostWarps, 1)
    rotate_by_lanes(const __grid_constant__ Problem p) {
  constexpr int kStage = Tile::kRows * Tile::template kStageStride<X>;
  char* stage = cuda::dynamic_shared<char>() + warp_index() * 2 * kStage;
  char* next = stage + kStage;
  const auto before = Tile::Signs::of(p.rotation.inverse ? nullptr : p.rotation.table);  // of x
  const auto after = Tile::Signs::of(p.rotation.inverse ? p.rotation.table : nullptr);   // of y

  const std::int64_t x_bytes = p.x_stride * static_cast<int>(sizeof(X));
  const std::int64_t y_bytes = p.y_stride * static_cast<int>(sizeof(X));
  const int warps = static_cast<int>(blockDim.x / 32);
  const std::int64_t step = std::int64_t{gridDim.x} * warps * Tile::kRows;
  std::int64_t first = (std::int64_t{blockIdx.x} * warps + warp_index()) * Tile::kRows;
  const auto rows_at = [&](std::int64_t row) {
    return static_cast<int>(p.rows - row < Tile::kRows ? p.rows - row : Tile::kRows);
  };
  const auto fetch = [&](std::int64_t row) {
    if (row >= p.rows) return;
    Tile::template fetch<X>(next, static_cast<const char*>(p.x) + row * x_bytes, x_bytes,
                            rows_at(row));
  };
  fetch(first);
  for (; first < p.rows; first += step) {
    std::swap(stage, next);
    cuda::copy_async_wait<0>();
    __syncwarp();
    fetch(first + step);
    float t[Tile::kEach];
    Tile::template load<X>(stage, before.again(), t);
#pragma unroll
    for (float& v : t) v *= p.rotation.scale;
    if (p.rotation.inverse) {
      Tile::template mix<true>(t);
      Tile::butterflies(t);
    } else {
      Tile::butterflies(t);
      Tile::template mix<false>(t);
    }
    Tile::template store<X>(t, after.again(), stage);  // where it has read
    __syncwarp();
    Tile::template put_out<X>(stage, static_cast<char*>(p.y) + first * y_bytes, y_bytes,
                              rows_at(first));
    __syncwarp();
  }
}

template <class Tile, class X>
Status run_by_lanes(const Problem& p, int device, Stream stream) {
  const int warp = 2 * Tile::kRows * Tile::template kStageStride<X>;
  const auto grid = cuda::tiles_grid(p.rows, Tile::kRows, kMostWarps, 0, warp, device);
  return cuda::launch(Op::kName, rotate_by_lanes<Tile, X>, grid, device, stream, p);
}

Status run(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace) {
  const Problem p{.x = a.x.data,
                  .y = a.y.data,
                  .x_stride = a.x.row_stride(),
                  .y_stride = a.y.row_stride(),
                  .rows = d.rows,
                  .rotation = cuda::row_rotation(d.rotation, d.dim, a.table.as<float>(), d.inverse),
                  .element = d.element};
  const int device = a.y.device.index;
  const auto by_warps = [&] { return cuda::run_by_warps(Op::kName, p, device, stream); };
  if (p.rows < cuda::kFewRows * cuda::limits(device).multiprocessors) return by_warps();
  if (d.rotation == Rotation::dense) return cuda::run_dense(Op::kName, p, device, stream);
  if (d.rotation == Rotation::identity || !cuda::pieces_aligned(a.x, p.rows) ||
      !cuda::pieces_aligned(a.y, p.rows)) {
    return by_warps();
  }
  return cuda::visit_tuned_dim<128>(
      d.dim,
      [&]<class Tile>(Tile) {
        return visit<float, f16, bf16>(
            d.element, [&]<class X>(Type<X>) { return run_by_lanes<Tile, X>(p, device, stream); });
      },
      by_warps);
}

constexpr Kernel<Op> kKernels[] = {cuda::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<AuraRotate>> aura_rotate_cuda() { return kKernels; }

}  // namespace bittern
