// What threads of qdq_affine_init share out: runs of groups, whose codes pass through a buffer.
#pragma once
#include <algorithm>
#include <cstdint>

#include "bittern/affine_desc.h"

namespace bittern::affine {

inline constexpr std::int64_t kMaxGroup = 1024, kBlockGroups = 1024, kBlockCodes = 1 << 16;

// A full block is whole words at every width; where a group is not, blocks start anew with each
// row, as words do.
struct Blocks {
  std::int64_t rows, row_groups, length;
  bool by_row;

  explicit Blocks(const AffineDesc& d) : rows(d.outer_size), row_groups(d.num_groups()) {
    // lsq idles while the last groups of a block converge, so its blocks are long.
    const std::int64_t codes = d.method == AffineMethod::lsq ? kBlockCodes : kBlockCodes / 8;
    length = std::clamp<std::int64_t>(codes / d.group_size / 32 * 32, 32, kBlockGroups);
    by_row = d.storage == CodeStorage::packed && d.group_size * d.code_bits() % 32 != 0;
  }
  std::int64_t per_row() const { return (row_groups + length - 1) / length; }
  std::int64_t size() const {
    return by_row ? rows * per_row() : (rows * row_groups + length - 1) / length;
  }
  struct Block {
    std::int64_t first, count;  // groups, counted through all rows
  };
  Block operator[](std::int64_t i) const {
    if (!by_row) return {i * length, std::min(length, rows * row_groups - i * length)};
    const std::int64_t k = i % per_row() * length;
    return {i / per_row() * row_groups + k, std::min(length, row_groups - k)};
  }
};

}  // namespace bittern::affine
