// The lanes of a warp, elements whose dtype is known at run time, and sums in the order of the
// halving tree: what the codec's kernels share whichever way they take rows.
#pragma once
#include <cstdint>

#include "bittern/dtype.h"
#include "cuda/device.cuh"

namespace bittern::cuda {

inline constexpr unsigned kAllLanes = ~0u;

__device__ inline int lane_index() { return static_cast<int>(threadIdx.x % 32); }
// The same, about which neither compiler knows anything: what is computed from it in a loop is not
// moved in front of the loop, where it would take registers.
__device__ inline int lane_again() {
  return __shfl_sync(kAllLanes, lane_index(), lane_index()) & 31;
}
__device__ inline int warp_index() { return static_cast<int>(threadIdx.x / 32); }

// ---- elements whose dtype is known at run time ----

__device__ inline float load_element(const void* p, DType type, std::int64_t i) {
  switch (type) {
    case DType::f16: return load_math(static_cast<const f16*>(p)[i]);
    case DType::bf16: return load_math(static_cast<const bf16*>(p)[i]);
    default: return static_cast<const float*>(p)[i];
  }
}
__device__ inline void store_element(void* p, DType type, std::int64_t i, float value) {
  switch (type) {
    case DType::f16: static_cast<f16*>(p)[i] = store_math<f16>(value); break;
    case DType::bf16: static_cast<bf16*>(p)[i] = store_math<bf16>(value); break;
    default: static_cast<float*>(p)[i] = value;
  }
}

// ---- sums in the order of the halving tree ----

__device__ inline float across(float x, int step) { return __shfl_xor_sync(kAllLanes, x, step); }
// A lane's sum and those of the lanes that differ from it in the bits `most`, ... `least`.
__device__ inline float sum_across(float sum, int most, int least = 1) {
#pragma unroll
  for (int step = most; step >= least; step /= 2) sum += across(sum, step);
  return sum;
}

// The first butterflies of a Hadamard matrix of `block` rows, on a warp's elements lane + 32 i:
// those that join elements less than 32 kEach apart.
template <int kEach>
__device__ inline void butterfly_lanes(float (&x)[kEach], int block = 32 * kEach) {
#pragma unroll
  for (int h = 1; h < 32; h *= 2) {
    if (h >= block) break;
    const bool upper = (lane_index() & h) != 0;
#pragma unroll
    for (float& v : x) {
      const float other = across(v, h);
      v = upper ? other - v : v + other;
    }
  }
#pragma unroll
  for (int h = 1; h < kEach; h *= 2) {
    if (32 * h >= block) break;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if ((i & h) != 0) continue;
      const float a = x[i], b = x[i + h];
      x[i] = a + b;
      x[i + h] = a - b;
    }
  }
}

// Of leaf(first), leaf(first + step), ... below kCount: the last addition joins the leaves that
// differ in the lowest bit, the first ones those that differ in the highest. Zeros that pad a tree
// are not added: that could only turn -0 into 0.
template <int kFirst, int kStep, int kCount, class Leaf>
__device__ inline auto halving_sum(const Leaf& leaf) {
  if constexpr (kFirst + kStep >= kCount) {
    return leaf(kFirst);
  } else {
    const auto even = halving_sum<kFirst, 2 * kStep, kCount>(leaf);
    return even + halving_sum<kFirst + kStep, 2 * kStep, kCount>(leaf);
  }
}

}  // namespace bittern::cuda
