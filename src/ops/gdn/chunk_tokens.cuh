// Products of a warpgroup that has 64 values of a head and a column for each token of a chunk, as
// the chains of the forward and the backward pass are made of.
#pragma once
#include "ops/gdn/chunk_prepare.cuh"

namespace bittern::chunk_forward {

constexpr int kGroupThreads = 128;
constexpr int kGroupValues = 64;
constexpr int kTokenTiles = kMostRows / 8;
constexpr int kPairThreads = 2 * kGroupThreads;  // one that computes, one that copies

// What a lane has of a product with a column for each token: element 4 t + e is row
// lane / 4 + 8 (e / 2) of the warp's 16, token 8 t + 2 (lane % 4) + e % 2.
using TokenSums = float[4 * kTokenTiles];
using TokenPairs = std::uint32_t[kTokenTiles / 2][4];  // rounded: left sides, 16 tokens each

template <class X>
__device__ void multiply_tokens(TokenSums& d, const std::uint32_t (&a)[4], cuda::WarpgroupMatrix b,
                                bool add) {
  if constexpr (std::is_same_v<X, bf16>) {
    cuda::warpgroup_multiply_bf16(d, a, b, add);
  } else {
    cuda::warpgroup_multiply_f16(d, a, b, add);
  }
}
template <class X>
__device__ void multiply_keys(float (&d)[kWide / 2], const std::uint32_t (&a)[4],
                              cuda::WarpgroupMatrix b) {
  if constexpr (std::is_same_v<X, bf16>) {
    cuda::warpgroup_multiply_rows_bf16<kPart>(d, a, b);
  } else {
    cuda::warpgroup_multiply_rows_f16<kPart>(d, a, b);
  }
}
// The factors of a lane's two tokens of tile t.
__device__ inline float2 two_of(const float (&factor)[kMostRows], int t) {
  return *reinterpret_cast<const float2*>(factor + 8 * t + 2 * (static_cast<int>(threadIdx.x) % 4));
}

}  // namespace bittern::chunk_forward
