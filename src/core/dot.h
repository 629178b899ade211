// Dot products in a fixed order that vectors of 8 or 16 lanes share:
//
//   sum[i % 16] = fma(a_i, b_i, sum[i % 16]), i ascending, each from +0; then the halving tree of
//   the 16 (numerics.h)
#pragma once
#include <cmath>
#include <cstdint>

namespace bittern {

inline constexpr std::int64_t kDotLanes = 16;

inline float dot(const float* a, const float* b, std::int64_t n) {
  float sum[kDotLanes] = {};
  for (std::int64_t i = 0; i < n; ++i)
    sum[i % kDotLanes] = std::fma(a[i], b[i], sum[i % kDotLanes]);
  for (std::int64_t stride = kDotLanes / 2; stride > 0; stride /= 2)
    for (std::int64_t i = 0; i < stride; ++i) sum[i] += sum[i + stride];
  return sum[0];
}

}  // namespace bittern
