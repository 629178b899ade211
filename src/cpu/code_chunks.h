// Rows of codes cut into chunks, which threads take.
#pragma once
#include <algorithm>
#include <cstdint>

namespace bittern::cpu {

template <std::int64_t kLength>
struct Chunks {
  static_assert(kLength % 512 == 0, "whole cache lines, packed at any width");
  std::int64_t rows, row_length;

  struct Chunk {
    std::int64_t row, first, count;
  };
  std::int64_t per_row() const { return (row_length + kLength - 1) / kLength; }
  std::int64_t size() const { return rows * per_row(); }
  // Chunks of about 64 Ki codes; fewer are not worth a thread.
  std::int64_t grain() const {
    return (std::int64_t{1} << 16) / std::clamp<std::int64_t>(row_length, 1, kLength);
  }
  Chunk operator[](std::int64_t i) const {
    const std::int64_t first = i % per_row() * kLength;
    return {i / per_row(), first, std::min(kLength, row_length - first)};
  }
};

// What is read and written by turns: a chunk of f32 is two pages.
inline constexpr std::int64_t kCodeChunk = 2048;
using CodeChunks = Chunks<kCodeChunk>;

// Work that waits for memory takes short chunks from kReadStreams places in turn: the hardware
// reads ahead in each of them, so it covers more pages than in one stream.
inline constexpr std::int64_t kShortChunk = 512, kReadStreams = 4;
using ShortChunks = Chunks<kShortChunk>;

}  // namespace bittern::cpu
