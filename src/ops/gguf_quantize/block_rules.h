// What ref and the SIMD kernels of gguf_quantize share: the constants of the header's rules, and
// the scalar steps that are not worth vectors.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "bittern/gguf_desc.h"

namespace bittern::blocks {

// The largest magnitude of a weight.
constexpr float limit(BlockType type) {
  constexpr float kLargestHalf = 65504;
  switch (type) {
    case BlockType::q4_0: return 8 * kLargestHalf;
    case BlockType::q5_0: return 16 * kLargestHalf;
    case BlockType::q8_0: return 127 * kLargestHalf;
    default: return kLargestHalf;
  }
}

inline void put_f16(std::uint8_t* at, float x) {
  const f16 half = to_f16(x);
  std::memcpy(at, &half, sizeof half);
}

}  // namespace bittern::blocks
