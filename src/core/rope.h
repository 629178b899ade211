// A pair of elements turned by its angle, operation by operation as bittern/ops/rope.h states it.
#pragma once
#include <cstdint>

#include "core/angle.h"
#include "core/host_device.h"

namespace bittern {

struct RopeTurn {
  float cos, sin;

  BITTERN_HOST_DEVICE float first(float x_a, float x_b) const { return x_a * cos - x_b * sin; }
  BITTERN_HOST_DEVICE float second(float x_a, float x_b) const { return x_b * cos + x_a * sin; }
};

BITTERN_HOST_DEVICE inline RopeTurn rope_turn(std::int32_t position, float inverse_frequency,
                                              float factor) {
  const angle::CosSin turn =
      angle::cos_sin(static_cast<double>(position) * static_cast<double>(inverse_frequency));
  return {static_cast<float>(turn.cos) * factor, static_cast<float>(turn.sin) * factor};
}

// The elements of pair i of `half` pairs.
struct RopePair {
  std::int64_t first, second;
};
BITTERN_HOST_DEVICE inline RopePair rope_pair(std::int64_t i, std::int64_t half, bool interleaved) {
  if (interleaved) return {2 * i, 2 * i + 1};
  return {i, i + half};
}

}  // namespace bittern
