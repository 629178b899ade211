// What one thread of a gated delta rule's kernel works in: chunks of up to 64 tokens, keys and
// values of up to 256 elements.
#pragma once
#include <cstdint>

namespace bittern::cpu::gdn {

inline constexpr std::int64_t kRows = 64, kColumns = 256;
using Row = float[kRows];              // a number per token
using Matrix = float[kRows * kRows];   // a number per pair of tokens; rows are kRows apart
using Tile = float[kRows * kColumns];  // a vector per token

struct alignas(64) RecomputeScratch {
  Matrix a;
  Tile scaled, product;
  Row beta, decay;
};

}  // namespace bittern::cpu::gdn
