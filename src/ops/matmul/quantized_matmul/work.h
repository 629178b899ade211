// How quantized_matmul's kernel cuts its problem, and what a thread works in.
//
// Rows of x are taken in blocks that fit the L2, and a block in tiles of 12 (not of integers), then
// 4, 2 and 1 rows. A tile is packed so that what one step reads lies together:
//
//   integers  for every 32 inputs, for each byte of an int16 (high, then low), for every 4 inputs:
//             a word of 4 codes for each row of the tile; beside them for each run of inputs
//             d, d C and -offset C (RunFactors) for each row
//   floats    for each input, a number for each row
//   pairs     for every 2 inputs, a word of 2 bf16 for each row; 0 follows an odd last one
//
// Panels of floats and pairs are expanded slab by slab, some at a time. Pairs of a slab stay in the
// L2, and a tile's part of x stays in the L1 while it meets all of them.
#pragma once
#include <algorithm>
#include <cstdint>

#include "bittern/ops/quantized_matmul.h"
#include "ops/matmul/panels.h"

namespace bittern::matmul {

// Rows of a tile at most.
inline constexpr std::int64_t kTile = 12, kIntegerTile = 4;
// Panels that meet a tile of many rows at once.
inline constexpr std::int64_t kPanelsAtOnce = 3, kPairPanels = 8;
// Up to so many rows each thread packs x for itself.
inline constexpr std::int64_t kFewRows = 4;

constexpr std::int64_t lines(std::int64_t bytes) { return (bytes + 63) / 64 * 64; }

// What products are made of: integers (int16, int8), floats, or pairs of bf16.
enum class Terms { integers, floats, pairs };

struct Work {
  explicit Work(const QuantizedMatmulDesc& desc, bool pairs) : d(desc) {
    const std::int64_t inputs = std::max<std::int64_t>(d.weights.inputs, 1);
    terms = pairs                                 ? Terms::pairs
            : d.activations == Activations::exact ? Terms::floats
                                                  : Terms::integers;
    planes = d.activations == Activations::int16 ? 2 : 1;
    const std::int64_t most = terms == Terms::floats  ? kFloatRows
                              : terms == Terms::pairs ? kPairBytes / (inputs * 2)
                                                      : kCodeBytes / (inputs * planes);
    block_rows = std::clamp<std::int64_t>(most / tile() * tile(), kTile, kFloatRows * 4);
    block_rows = std::max<std::int64_t>(std::min(block_rows, d.rows), 1);
    few = block_rows <= kFewRows;
    if (terms == Terms::integers) runs = d.weights.inputs / d.run();
  }

  // Rows of a tile: the most, and of the next where so many are left.
  std::int64_t tile() const { return terms == Terms::integers ? kIntegerTile : kTile; }
  std::int64_t tile_rows(std::int64_t rows) const {
    return rows >= tile() ? tile() : rows >= 4 ? 4 : rows >= 2 ? 2 : 1;
  }

  // Bytes of a packed row of x; of a block's x, and of its factors.
  std::int64_t x_row_bytes() const {
    switch (terms) {
      case Terms::integers: return d.weights.inputs * planes;
      case Terms::floats: return d.weights.inputs * 4;
      case Terms::pairs: break;
    }
    return (d.weights.inputs + 1) / 2 * 4;
  }
  std::int64_t x_bytes(std::int64_t rows) const { return lines(rows * x_row_bytes()); }
  std::int64_t factor_bytes(std::int64_t rows) const { return lines(rows * runs * 12); }
  std::int64_t packed_bytes() const { return x_bytes(block_rows) + factor_bytes(block_rows); }

  // Panels that are multiplied at once, and inputs of each that are expanded at once.
  std::int64_t panels_at_once() const {
    switch (terms) {
      case Terms::integers: return few ? 1 : kPanelsAtOnce;
      case Terms::floats: return few ? 4 : 2;
      case Terms::pairs: break;
    }
    return few ? 4 : kPairPanels;
  }
  std::int64_t slab() const {
    const std::int64_t step =
        d.weights.plain() ? 1 : panel_format(d.weights).unit * panel_format(d.weights).together;
    return std::max(step, (few ? std::int64_t{128} : kSlab) / step * step);
  }

  // Of a thread.
  std::int64_t own_x_bytes() const { return few ? packed_bytes() : 0; }
  std::int64_t panel_bytes() const { return lines(kLanes * d.weights.row_bytes()); }
  std::int64_t repacked_bytes() const {
    return d.weights.stored() ? panels_at_once() * panel_bytes() : 0;
  }
  std::int64_t grid_bytes() const { return panels_at_once() * 2 * runs * kLanes * 4; }
  std::int64_t expanded_bytes() const {
    if (terms == Terms::integers) return 0;
    return panels_at_once() * kLanes * 4 *
           ((terms == Terms::pairs ? slab() / 2 : slab()) + block_rows);
  }
  std::int64_t slot_bytes() const {
    return own_x_bytes() + repacked_bytes() + grid_bytes() + expanded_bytes() + 64;
  }
  std::int64_t shared_bytes() const { return few ? 0 : packed_bytes(); }

  static constexpr std::int64_t kCodeBytes = 512 << 10;  // of x's codes in a block
  static constexpr std::int64_t kPairBytes = 8 << 20;    // of x's pairs in a block
  static constexpr std::int64_t kFloatRows = 132;
  static constexpr std::int64_t kSlab = 1024;  // inputs; even

  QuantizedMatmulDesc d;
  Terms terms;
  bool few;
  std::int64_t planes = 1;
  std::int64_t block_rows = 1;
  std::int64_t runs = 0;  // of a row
};

// A block of rows, packed.
struct PackedRows {
  std::int64_t first, rows;
  std::uint8_t* x;
  float* factors;
};

}  // namespace bittern::matmul
