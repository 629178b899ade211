// Rows of codes cut into chunks: what threads share out. A full chunk is whole words at every width
// and small enough for L1.
#pragma once
#include <algorithm>
#include <cstdint>

namespace bittern::cpu {

struct CodeChunks {
  static constexpr std::int64_t kLength = 2048;
  std::int64_t rows, row_length;

  struct Chunk {
    std::int64_t row, first, count;
  };
  std::int64_t per_row() const { return (row_length + kLength - 1) / kLength; }
  std::int64_t size() const { return rows * per_row(); }
  // Chunks of about 64 Ki codes, fewer than which are not worth a thread.
  std::int64_t grain() const {
    return (std::int64_t{1} << 16) / std::clamp<std::int64_t>(row_length, 1, kLength);
  }
  Chunk operator[](std::int64_t i) const {
    const std::int64_t first = i % per_row() * kLength;
    return {i / per_row(), first, std::min(kLength, row_length - first)};
  }
};

}  // namespace bittern::cpu
