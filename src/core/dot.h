// Dot products in a fixed order that vectors of any width share:
//
//   sum[i % lanes] = fma(a_i, b_i, sum[i % lanes]), i ascending, each from +0; then the halving
//   tree of these (numerics.h); 16 lanes unless stated otherwise
#pragma once
#include <cmath>
#include <cstdint>

namespace bittern {

inline constexpr std::int64_t kDotLanes = 16;

template <std::int64_t kLanes = kDotLanes>
float dot(const float* a, const float* b, std::int64_t n) {
  float sum[kLanes] = {};
  for (std::int64_t i = 0; i < n; ++i) sum[i % kLanes] = std::fma(a[i], b[i], sum[i % kLanes]);
  for (std::int64_t stride = kLanes / 2; stride > 0; stride /= 2)
    for (std::int64_t i = 0; i < stride; ++i) sum[i] += sum[i + stride];
  return sum[0];
}

}  // namespace bittern
