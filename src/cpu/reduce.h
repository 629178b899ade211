// How sums by the halving tree are cut into blocks; the arithmetic is in reduce-inl.h.
#pragma once
#include <cstdint>

namespace bittern::cpu {

// A block of partial sums and its neighbours stay in L1, a stack of them in L2.
inline constexpr std::int64_t kBlockLanes = 2048;

// n terms of each of `columns` parameters, a matrix [n, columns], cut into blocks of `rows` rows
// (a power of two), the last one padded with zeros. `sums` such matrices follow one another.
struct BlockShape {
  std::int64_t n, columns, sums, rows, blocks;

  // columns * sums <= kBlockLanes
  BlockShape(std::int64_t terms, std::int64_t column_count, std::int64_t sum_count)
      : n(terms), columns(column_count), sums(sum_count), rows(1) {
    while (rows < n && 2 * rows * columns * sums <= kBlockLanes) rows *= 2;
    blocks = (n + rows - 1) / rows;
  }
  std::int64_t lanes() const { return rows * columns * sums; }
};

}  // namespace bittern::cpu
