// The halving tree over rows of partial sums, column by column: numerics.h's halving_sum of every
// column of [rows, columns] f32, which is overwritten.
//
// Let P be the number of rows padded to a power of two. The stages whose strides are S and more
// leave S sums, of the rows i, i + S, i + 2S .., i < S, each a halving tree by itself: so threads
// take such subtrees, and what they leave is a tree of S rows.
#pragma once
#include "cuda/device.cuh"
#include "cuda/runtime.cuh"

namespace bittern::cuda {

constexpr int kTreeWarps = 16;               // subtrees of a column in the last kernel
constexpr std::int64_t kTreeFold = 256;      // rows that another kernel leaves to it
constexpr std::int64_t kTreeFoldOver = 512;  // .. where there can be more than these

struct TreeRows {
  float* partial;
  std::int64_t columns;
  std::int64_t rows;            // at most
  const std::int64_t* counted;  // how many there are, if only the device knows

  __device__ std::int64_t count() const { return counted != nullptr ? *counted : rows; }
};

__device__ inline std::int64_t padded_rows(std::int64_t rows) {
  std::int64_t padded = 1;
  while (padded < rows) padded *= 2;
  return padded;
}

// One subtree: the `leaves` (a power of two) rows first, first + step, ..; those past the last row
// are +0. Its sum is left in its first row.
class Subtree {
 public:
  __device__ Subtree(const TreeRows& tree, std::int64_t rows, std::int64_t column)
      : column_(tree.partial + column), columns_(tree.columns), rows_(rows) {}

  __device__ float sum(std::int64_t first, std::int64_t step, std::int64_t leaves) const {
    while (leaves >= 8) leaves = halve<8>(first, step, leaves);
    while (leaves >= 2) leaves = halve<2>(first, step, leaves);
    return at(first);
  }

 private:
  __device__ float at(std::int64_t row) const {
    return row < rows_ ? column_[row * columns_] : 0.0f;
  }
  // log2(R) stages; returns the leaves that are left.
  template <int R>
  __device__ std::int64_t halve(std::int64_t first, std::int64_t step, std::int64_t leaves) const {
    const std::int64_t left = leaves / R;
    for (std::int64_t k = 0; k < left && first + k * step < rows_; ++k) {
      float v[R];
#pragma unroll
      for (int i = 0; i < R; ++i) v[i] = at(first + (k + i * left) * step);
#pragma unroll
      for (int stride = R / 2; stride > 0; stride /= 2) {
#pragma unroll
        for (int i = 0; i < stride; ++i) v[i] += v[i + stride];
      }
      column_[(first + k * step) * columns_] = v[0];
    }
    return left;
  }

  float* column_;
  std::int64_t columns_, rows_;
};

// Leaves kTo rows. Thread: (one of them, column), columns fastest.
template <std::int64_t kTo>
__global__ void __launch_bounds__(kBlock) fold_rows(const TreeRows tree, Divisor columns) {
  const std::int64_t rows = tree.count(), padded = padded_rows(rows);
  if (padded <= kTo) return;
  const std::int64_t threads = std::int64_t{gridDim.x} * kBlock;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kBlock + threadIdx.x; i < kTo * tree.columns;
       i += threads) {
    const std::int64_t row = columns.divide(i);
    Subtree(tree, rows, i - row * tree.columns).sum(row, kTo, padded / kTo);
  }
}

// Warp w and lane l of a block: subtree w of the block's column l.
template <class Write>
__global__ void __launch_bounds__(32 * kTreeWarps)
    sum_rows_kernel(const TreeRows tree, bool folded, const Write write) {
  __shared__ float sums[kTreeWarps][32];
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  std::int64_t rows = tree.count();
  if (folded && rows > kTreeFold) rows = kTreeFold;
  const std::int64_t padded = padded_rows(rows);
  const int subtrees = padded < kTreeWarps ? static_cast<int>(padded) : kTreeWarps;
  for (std::int64_t first = std::int64_t{blockIdx.x} * 32; first < tree.columns;
       first += std::int64_t{gridDim.x} * 32) {
    const std::int64_t column = first + lane;
    if (warp < subtrees && column < tree.columns)
      sums[warp][lane] = Subtree(tree, rows, column).sum(warp, subtrees, padded / subtrees);
    for (int stride = subtrees / 2; stride > 0; stride /= 2) {
      __syncthreads();
      if (warp < stride) sums[warp][lane] += sums[warp + stride][lane];
    }
    if (warp == 0 && column < tree.columns) write(column, sums[0][lane]);
    __syncthreads();
  }
}

// write(column, sum) for every column.
template <class Write>
Status sum_rows(std::string_view op, const TreeRows& tree, const Write& write, int device,
                Stream stream) {
  const bool fold = tree.rows > kTreeFoldOver;
  if (fold) {
    BITTERN_TRY(launch(op, fold_rows<kTreeFold>, grid_for(kTreeFold * tree.columns), device, stream,
                       tree, Divisor(tree.columns)));
  }
  return launch(op, sum_rows_kernel<Write>,
                Grid{.blocks = (tree.columns + 31) / 32, .threads = 32 * kTreeWarps}, device,
                stream, tree, fold, write);
}

}  // namespace bittern::cuda
