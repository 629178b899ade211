// Products of a warpgroup that has 64 values of a head and a column for each token of a chunk, as
// the chains of the forward and the backward pass are made of.
#pragma once
#include <algorithm>
#include <string>

#include "ops/gdn/chunk_prepare.cuh"
#include "plan/kernel.h"

namespace bittern::chunk_forward {

constexpr int kGroupThreads = 128;
constexpr int kGroupValues = 64;
constexpr int kTokenTiles = kMostRows / 8;
constexpr int kPairThreads = 2 * kGroupThreads;  // one that computes, one that copies

// The barriers of a chain, each of a warpgroup and the threads that copy for it: chunk n has come,
// and may be overwritten, save what is written out of it.
constexpr int kStages = 3;
template <int kGroups>
__device__ int full_barrier(int stage, int group) {
  return 1 + stage * kGroups + group;
}
template <int kGroups, int kCount = kStages>
__device__ int done_barrier(int stage, int group) {
  return 1 + (kCount + stage) * kGroups + group;
}

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
// The same with b by rows.
template <class X>
__device__ void multiply_token_rows(TokenSums& d, const std::uint32_t (&a)[4],
                                    cuda::WarpgroupMatrix b, bool add) {
  if constexpr (std::is_same_v<X, bf16>) {
    cuda::warpgroup_multiply_rows_bf16(d, a, b, add);
  } else {
    cuda::warpgroup_multiply_rows_f16(d, a, b, add);
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
template <class X>
__device__ void multiply_keys(float (&d)[kWide / 4], const std::uint32_t (&a)[4],
                              cuda::WarpgroupMatrix b) {
  multiply_token_rows<X>(d, a, b, true);
}
// The factors of a lane's two tokens of tile t.
__device__ inline float2 two_of(const float (&factor)[kMostRows], int t) {
  return *reinterpret_cast<const float2*>(factor + 8 * t + 2 * (static_cast<int>(threadIdx.x) % 4));
}

// factor * x of each token.
template <class X>
__device__ void scale_pairs(TokenSums& to, const TokenPairs& x, const float (&factor)[kMostRows]) {
#pragma unroll
  for (int t = 0; t < kTokenTiles; ++t) {
    const float2 f = two_of(factor, t);
#pragma unroll
    for (int down = 0; down < 2; ++down) {
      const float2 pair = unpack_pair<X>(x[t / 2][t % 2 * 2 + down]);
      to[4 * t + 2 * down] = f.x * pair.x;
      to[4 * t + 2 * down + 1] = f.y * pair.y;
    }
  }
}

// ---- the kernels that are made of these, for Kernel ----

// They have up to a block for each chunk, head and 64 values, and `blocks` for each sequence and
// head, which no loop goes on with.
inline Status supports_warpgroups(const GdnDesc& d, Device device, std::int64_t blocks) {
  BITTERN_TRY(supports_tiles(d));
  if (d.value_dim % kGroupValues != 0) return refused("value_dim", d.value_dim, "a multiple of 64");
  constexpr std::int64_t kMostBlocks = 0x7fffffff;
  const std::int64_t chunks = d.batch * d.state_chunks() * (d.value_dim / kGroupValues);
  const std::int64_t sequences = blocks * d.sequence_count();
  if (std::max(chunks, sequences) > kMostBlocks / d.value_heads)
    return unsupported("chunks and value heads: more than 2^31 - 1, expected fewer");
  return cuda::needs_warpgroups(device);
}

// Rounding one factor of a product to bf16 changes it by 2^-8 (to f16 by 2^-11), both by 2^-7 and
// 2^-16. The rest is for decays within 2^-16 and the sums of both sides, of at most 256 + 64 terms.
inline PrecisionGuarantee warpgroup_guarantee(const GdnDesc& d) {
  return {.math_precision = d.element,
          .accumulator = DType::f32,
          .same_bits_on_all_backends = false,
          .error_norm = ErrorNorm::terms,
          .error_bound = kGdnInverseBound};
}

}  // namespace bittern::chunk_forward
