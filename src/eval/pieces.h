// The pieces of a text that models read, and the positions that are scored in each.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "bittern/eval.h"
#include "bittern/status.h"

namespace bittern {

// Tokens [begin, begin + length). Those after positions `from` to length - 2 are scored.
struct Piece {
  std::int64_t begin = 0, length = 0, from = 0;
  std::int64_t scored() const { return length - 1 - from; }
};

Result<std::vector<Piece>> cut_pieces(std::int64_t tokens, const EvalOptions& options);

// What a model reads of a piece.
std::vector<std::int32_t> piece_tokens(const Piece& piece, std::span<const std::int32_t> tokens,
                                       const EvalOptions& options);

}  // namespace bittern
