// Rows of x as integers: the rule of bittern/ops/quantized_matmul.h in plain scalar form.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace bittern::matmul {

inline constexpr float kInt16Scale = 32512, kInt8Scale = 127;
// Below it a scale would be so subnormal that its own rounding pushed codes out of range.
inline constexpr float kLeastScale = 0x1p-141f;

// The scale of x[0, n).
inline float activation_scale(const float* x, std::int64_t n, float full_scale) {
  float most = 0;
  for (std::int64_t k = 0; k < n; ++k) {
    if (!std::isfinite(x[k])) return std::numeric_limits<float>::quiet_NaN();
    most = std::max(most, std::fabs(x[k]));
  }
  return most == 0 ? 0.0f : std::max(most / full_scale, kLeastScale);
}

inline int activation_code(float x, float scale) {
  if (!(scale > 0)) return 0;  // zeros, or NaN
  return static_cast<int>(std::nearbyint(x / scale));
}

}  // namespace bittern::matmul
