// Halving trees (docs/numerics.md) across the lanes of a warp.
#pragma once
#include <cstdint>

namespace bittern::cuda {

inline constexpr unsigned kWarp = 0xffffffffu;

// N sums over the same elements.
template <class F, int N>
struct Sums {
  F at[N];
  __device__ friend Sums operator+(Sums a, const Sums& b) {
#pragma unroll
    for (int i = 0; i < N; ++i) a.at[i] += b.at[i];
    return a;
  }
  __device__ Sums from_lane(int lane) const {
    Sums other;
#pragma unroll
    for (int i = 0; i < N; ++i) other.at[i] = __shfl_sync(kWarp, at[i], lane);
    return other;
  }
};

// The tree over leaf(0) .. leaf(size - 1), size <= 1024, in every lane of a whole warp; leaf(i) is
// asked of lane i % 32 and must be zero beyond the size. Rows of 32 leaves come in bit-reversed
// order, so that those to be added first are neighbours and a binary counter holds the rest.
template <class F, int N, class Leaf>
__device__ Sums<F, N> warp_tree(int size, const Leaf& leaf) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  int log2_rows = 0, width = 32;
  while (32 << log2_rows < size) ++log2_rows;
  while (width / 2 >= size) width /= 2;
  Sums<F, N> sum, partial[5];
  for (unsigned i = 0; i < 1u << log2_rows; ++i) {
    const unsigned row = log2_rows == 0 ? 0 : __brev(i) >> (32 - log2_rows);
    sum = leaf(static_cast<int>(row) * 32 + lane);
#pragma unroll
    for (int level = 0; level < 5; ++level) {
      if ((i >> level & 1) == 0) {
        partial[level] = sum;
        break;
      }
      sum = partial[level] + sum;
    }
  }
  for (int distance = width / 2; distance > 0; distance /= 2)
    sum = sum + sum.from_lane(lane ^ distance);
  return sum.from_lane(0);  // lanes beyond the width have summed nothing
}

// The tree over M values a lane and the lanes of a team of 2 kDistance, value j of lane t being
// element t M + j. Lanes first, each step leaving a lane half of its values: those of even j or
// those of odd j, which come together last. Every lane gets the sum.
template <int kDistance, int M, class F>
__device__ F team_tree(const F (&v)[M], int lane) {
  if constexpr (kDistance == 0 && M == 1) {
    return v[0];
  } else if constexpr (kDistance == 0) {
    F half[M / 2];
#pragma unroll
    for (int j = 0; j < M / 2; ++j) half[j] = v[j] + v[j + M / 2];
    return team_tree<0>(half, lane);
  } else if constexpr (M == 1) {
    const F half[1] = {v[0] + __shfl_xor_sync(kWarp, v[0], kDistance)};
    return team_tree<kDistance / 2>(half, lane);
  } else {
    const bool odd = (lane & kDistance) != 0;
    F half[M / 2];
#pragma unroll
    for (int j = 0; j < M / 2; ++j) {
      const F mine = odd ? v[2 * j + 1] : v[2 * j], other = odd ? v[2 * j] : v[2 * j + 1];
      half[j] = mine + __shfl_xor_sync(kWarp, other, kDistance);
    }
    const F sum = team_tree<kDistance / 2>(half, lane);
    return sum + __shfl_xor_sync(kWarp, sum, kDistance);
  }
}

// Two trees at once over the lanes of a team of kLanes: the lower half of the team gets the sum of
// a, the upper half that of b.
template <int kLanes, int M, class F>
__device__ F team_tree_of_two(const F (&a)[M], const F (&b)[M], int lane) {
  const bool upper = (lane & kLanes / 2) != 0;
  F v[M];
#pragma unroll
  for (int j = 0; j < M; ++j) {
    const F mine = upper ? b[j] : a[j], other = upper ? a[j] : b[j];
    v[j] = mine + __shfl_xor_sync(kWarp, other, kLanes / 2);
  }
  return team_tree<kLanes / 4>(v, lane);
}

// v[0] of the halving tree over kRows rows of values, row by row.
template <int kRows, int M, class F>
__device__ void row_tree(F (&v)[kRows][M]) {
#pragma unroll
  for (int half = kRows / 2; half > 0; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) {
#pragma unroll
      for (int j = 0; j < M; ++j) v[i][j] += v[i + half][j];
    }
  }
}

}  // namespace bittern::cuda
