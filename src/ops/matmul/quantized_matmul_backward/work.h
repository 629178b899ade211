// How quantized_matmul_backward's kernel cuts its two products, and what a thread works in.
//
//   d_x = d_y W         the terms are outputs: some of them, of some columns of W, are expanded and
//                       meet a block of rows of d_y
//   dw^T = x^T d_y      the terms are rows: a block of dw^T, some inputs by some panels of outputs,
//                       is summed over all rows, and then over its groups
//
// Both are made of tiles: cpu/matmul-inl.h's, of floats, or cpu/bf16-inl.h's, of pairs of bf16. A
// block's operands are copied to scratch of the L2's size, as words of one term or of two, where
// what a tile reads lies together.
#pragma once
#include <algorithm>
#include <cstdint>

#include "bittern/ops/quantized_matmul_backward.h"
#include "ops/matmul/panels.h"

namespace bittern::matmul {

struct BackwardWork {
  BackwardWork(const QuantizedMatmulBackwardDesc& desc, bool of_pairs) : d(desc), pairs(of_pairs) {}

  static constexpr std::int64_t kDepth = 192;  // words of terms that are added at once
  static constexpr std::int64_t kRows = 516, kColumns = 512;       // of a block of d_x
  static constexpr std::int64_t kInputs = 768, kPanels = 16;       // of a block of dw^T
  static constexpr std::int64_t kTileRows = 6, kTileColumns = 64;  // of a tile, at most
  // Between rows of d_y in a left operand of floats, so that they do not share sets of the cache;
  // inputs of x, or rows of pairs of d_y, that lie together in one, so that a tile's are in few
  // pages.
  static constexpr std::int64_t kPad = 16, kStrip = 48;
  static_assert(kRows * kPad <= kDepth * kStrip);

  // Rows that are worth expanding W for once more.
  static constexpr std::int64_t kLeastRows = 96;

  // Columns of W that can be expanded by themselves.
  std::int64_t column_unit() const {
    if (d.weights.plain()) return kTileColumns;
    const PanelFormat format = panel_format(d.weights);
    return std::max<std::int64_t>(kTileColumns, format.unit * format.together);
  }
  std::int64_t column_units() const {
    return (d.weights.inputs + column_unit() - 1) / column_unit();
  }
  // Rows of a block, where all are cut into `parts`: whole tiles.
  std::int64_t block_rows(std::int64_t parts) const {
    return ((d.rows + parts - 1) / parts + kTileRows - 1) / kTileRows * kTileRows;
  }

  // The largest blocks that there are.
  std::int64_t rows() const { return std::min(kRows, d.rows); }
  std::int64_t columns() const { return std::min(kColumns, column_units() * column_unit()); }
  std::int64_t inputs() const {
    return d.weights.affine() ? std::min(kInputs, d.weights.inputs) : 0;
  }
  std::int64_t outputs() const { return std::min(kPanels, d.weights.panels()) * kLanes; }

  // Words of a thread: the operands of its tiles, and the sums of a block.
  std::int64_t left() const { return kDepth * (std::max(rows(), inputs()) + kStrip); }
  std::int64_t right() const { return kDepth * std::max(columns(), lines(outputs())); }
  std::int64_t sums() const { return std::max(inputs() * lines(outputs()), rows() * columns()); }
  std::int64_t repacked_bytes() const {
    if (!d.weights.stored()) return 0;
    WeightDesc part = d.weights;
    part.inputs = std::max(columns(), inputs());
    return lines(kLanes * part.row_bytes());
  }
  std::int64_t slot_bytes() const {
    return static_cast<std::int64_t>(sizeof(float)) * (left() + right() + sums()) +
           repacked_bytes();
  }

  QuantizedMatmulBackwardDesc d;
  bool pairs;  // whether words are pairs of bf16

 private:
  // Whole lines of bytes, and whole tiles of columns.
  static constexpr std::int64_t lines(std::int64_t n) { return (n + 63) / 64 * 64; }
};

// A product's work is units x parts, of which each thread takes a run. In how many parts, from
// `least` to `most`, the work is cut so that threads have nearly the same: each part expands or
// copies its operands anew, so there are as few as possible.
inline std::int64_t parts_for(std::int64_t units, std::int64_t least, std::int64_t most,
                              std::int64_t threads) {
  std::int64_t best = least;
  double best_excess = 1e9;
  for (std::int64_t parts = least; parts <= std::max(least, std::min(most, least + threads));
       ++parts) {
    const std::int64_t share = (units * parts + threads - 1) / threads;
    const double excess = static_cast<double>(share * threads) / static_cast<double>(units * parts);
    if (excess < 0.95 * best_excess) {
      best = parts;
      best_excess = excess;
    }
  }
  return best;
}

}  // namespace bittern::matmul
