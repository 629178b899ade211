// Rows that are rotated and nothing else: what aura_decode and aura_rotate do where no tile of
// registers fits. `Rows` has rows, rotation, and load(row, t) and store(row, t), by which a warp
// fetches a row into shared memory and writes one from there.
#pragma once
#include "ops/aura/aura_rotation.cuh"

namespace bittern::cuda {

// A warp to a row.
template <class Rows>
__global__ void __launch_bounds__(32 * kWarpsOfRows)
    rotate_by_warps(const __grid_constant__ Rows p) {
  const int n = p.rotation.dim;
  float* const t = dynamic_shared<float>() + warp_index() * 2 * n;
  const std::int64_t warps = std::int64_t{gridDim.x} * kWarpsOfRows;
  for (std::int64_t row = std::int64_t{blockIdx.x} * kWarpsOfRows + warp_index(); row < p.rows;
       row += warps) {
    p.load(row, t);
    p.store(row, rotate_by_warp(p.rotation, t, t + n));
    __syncwarp();
  }
}

// A block to many rows, for dense rotations.
template <class Rows>
__global__ void __launch_bounds__(32 * DenseBlock::kMostWarps)
    rotate_dense(const __grid_constant__ Rows p, const DenseBlock block) {
  constexpr int kRows = DenseBlock::kRows;
  auto* const tile = dynamic_shared<float>();
  float* const x = tile + DenseBlock::kTileBytes / 4 + warp_index() * 2 * kRows * block.stride;
  float* const y = x + kRows * block.stride;
  const std::int64_t step = std::int64_t{gridDim.x} * block.warps * kRows;
  for (std::int64_t base = std::int64_t{blockIdx.x} * block.warps * kRows; base < p.rows;
       base += step) {
    const std::int64_t first = base + warp_index() * kRows;
    for (int i = 0; i < kRows && first + i < p.rows; ++i) p.load(first + i, x + i * block.stride);
    __syncwarp();
    block.rotate(p.rotation, x, y, tile);
    for (int i = 0; i < kRows && first + i < p.rows; ++i) p.store(first + i, y + i * block.stride);
    __syncwarp();
  }
}

template <class Rows>
Status run_by_warps(std::string_view op, const Rows& p, int device, Stream stream) {
  const Grid grid{
      .blocks = (p.rows + kWarpsOfRows - 1) / kWarpsOfRows,
      .threads = 32 * kWarpsOfRows,
      .shared = sizeof(float) * 2 * kWarpsOfRows * static_cast<std::size_t>(p.rotation.dim)};
  return launch(op, rotate_by_warps<Rows>, grid, device, stream, p);
}

template <class Rows>
Status run_dense(std::string_view op, const Rows& p, int device, Stream stream) {
  const auto block = DenseBlock::plan(p.rotation.dim, 0, device);
  const std::int64_t rows = block.warps * DenseBlock::kRows;
  const Grid grid{
      .blocks = (p.rows + rows - 1) / rows, .threads = 32 * block.warps, .shared = block.shared};
  return launch(op, rotate_dense<Rows>, grid, device, stream, p, block);
}

}  // namespace bittern::cuda
