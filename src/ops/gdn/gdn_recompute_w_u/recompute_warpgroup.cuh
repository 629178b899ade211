// On tensor cores, by products of a warpgroup (sm_90a): bf16, chunks of 64, heads of 128. Sums and
// rounding are as in recompute_mma.cuh.
//
// Transposed, out^T = b^T A^T: the tensor cores read A's parts where they lie, and each warp scales
// its own columns of b on their way to registers and puts their results in their place. What counts
// is how long a block holds its shared memory: hence few barriers, items found with 32-bit indices,
// and whole chunks copied without tests of rows.
//
//   warp    i has columns 32 i .. 32 i + 31 of u, then of w, 16 at a time
//   gates   beta, then e^g. With A in f32 they come into the place of its last part, and every lane
//           has read its own before that is made: with more shared memory a block fewer would fit
#pragma once
#include <algorithm>

#include "core/math.h"
#include "ops/gdn/gdn_recompute_w_u/recompute_tiles.cuh"

namespace bittern::recompute {

constexpr int kSteps = kMostRows / 16;  // 16 x 16 tiles along an axis of A
constexpr int kTilePitch = 2 * kWide;   // bytes
constexpr int kTile = kMostRows * kTilePitch;
constexpr int kPart = kMostRows * kMatrixBytes;

template <class M>
struct WarpgroupShared {
  static constexpr int kKeys = 0, kValues = kTile, kMatrix = 2 * kTile;
  static constexpr int kGates = kMatrix + (sizeof(M) == 4 ? 2 : 1) * kPart;
  static constexpr int kGateBytes = kMostRows * sizeof(float);
  static constexpr int kBytes =
      std::max(kMatrix + kMatrixParts<M> * kPart, kGates + 2 * kGateBytes);
};
template <class M>
constexpr int kWarpgroupBlocks = sizeof(M) == 4 ? 4 : 5;  // that a multiprocessor has room for

// Of rows 16 s + 8 (e / 2) + 2 (lane % 4) + e % 2, as [s][e].
using LaneGates = float[kSteps][4];
__device__ inline void load_gates(LaneGates& to, int gates) {
#pragma unroll
  for (int i = 0; i < kMostRows / 8; ++i) {
    const auto pair =
        shared_at<float2>(gates + (8 * i + 2 * (static_cast<int>(threadIdx.x) % 4)) * 4);
    to[i / 2][i % 2 * 2] = pair.x;
    to[i / 2][i % 2 * 2 + 1] = pair.y;
  }
}

// A chunk's tiles, and A. kFull: all of them.
template <bool kFull, class M>
__device__ void copy_chunk(const Problem& p, const Problem::Item& item) {
  using Shared = WarpgroupShared<M>;
  const int rows = item.chunk.rows;
  copy_matrix<kMostRows, kFull>(p, Shared::kMatrix,
                                static_cast<const M*>(p.a) + item.value_row * kMostRows, rows);
  if (p.u != nullptr)
    copy_tile<kMostRows, kFull>(Shared::kValues, kTilePitch,
                                static_cast<const bf16*>(p.v) + item.value_row * kWide,
                                p.value_heads * kWide, rows, kWide);
  cuda::copy_async_commit();
  if (p.w != nullptr)
    copy_tile<kMostRows, kFull>(Shared::kKeys, kTilePitch,
                                static_cast<const bf16*>(p.k) + item.key_row * kWide,
                                p.key_heads * kWide, rows, kWide);
  cuda::copy_async_commit();
}

// The 16 columns of two pieces of A b, with the header's sums, in b's place, by a warp. Lane l has
// rows l / 16, l / 16 + 2 .. of column l % 16.
template <class M>
__device__ __noinline__ void sum_as_defined(int tile, unsigned piece, const M* a,
                                            std::int64_t stride, int rows, bool lower) {
  const unsigned lane = threadIdx.x % 32;
  const auto at = [&](int row) -> bf16& {
    return shared_at<bf16>(tile +
                           swizzled(static_cast<unsigned>(row), piece + lane / 8 % 2, kTilePitch) +
                           static_cast<int>(lane % 8 * 2));
  };
  __syncwarp();
  bf16 b[kMostRows];
  for (int j = 0; j < rows; ++j) b[j] = at(j);
  __syncwarp();
  for (int i = static_cast<int>(lane / 16); i < rows; i += 2) {
    float sum = 0;
    for (int j = 0; j < (lower ? i + 1 : rows); ++j)
      sum = std::fma(cuda::load_math(a[i * stride + j]), cuda::load_math(b[j]), sum);
    at(i) = cuda::store_math<bf16>(sum);
  }
}

// 16 columns of bf16(A b), the first or second half of the warp's, in the place of x:
// b = bf16(x * beta), or bf16(x * beta * decay).
template <class M, bool kDecay>
__device__ void multiply_columns(const Problem& p, const Problem::Item& item, int tile, int half,
                                 const LaneGates& beta, const LaneGates& decay) {
  const unsigned lane = threadIdx.x % 32, first_piece = threadIdx.x / 32 * 4;
  const int first =
      tile + (swizzled(lane % 8 + lane / 16 * 8, first_piece + lane / 8 % 2, kTilePitch) ^
              half * 2 * kPiece);
  const auto tiles = [&](int step) { return &shared_at<char>(first + step * 16 * kTilePitch); };
  std::uint32_t of_b[kSteps][4];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    cuda::load_tiles_transposed(of_b[step], tiles(step));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float2 x = unpack_pair<bf16>(of_b[step][i]);
      x.x *= beta[step][i / 2 * 2], x.y *= beta[step][i / 2 * 2 + 1];
      if constexpr (kDecay) x.x *= decay[step][i / 2 * 2], x.y *= decay[step][i / 2 * 2 + 1];
      of_b[step][i] = cuda::store_pair<bf16>(x.x, x.y);
    }
  }
  const auto matrix = cuda::warpgroup_matrix(&shared_at<char>(WarpgroupShared<M>::kMatrix));
  float sums[32] = {};
  cuda::warpgroup_begin();
#pragma unroll
  for (int part = kMatrixParts<M> - 1; part >= 0; --part)
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      cuda::warpgroup_multiply_bf16(sums, of_b[step], matrix.at(part * kPart + step * 32));
  cuda::warpgroup_end();
  std::uint32_t zeros[2] = {};  // as long as all results are finite
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    std::uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pairs[i] = cuda::store_pair<bf16>(sums[8 * step + 2 * i], sums[8 * step + 2 * i + 1]);
      zeros[i % 2] = cuda::add_zero_times_bf16(zeros[i % 2], pairs[i]);
    }
    cuda::store_tiles_transposed(tiles(step), pairs);
  }
  if (__all_sync(~0u, (zeros[0] | zeros[1]) == 0)) return;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) cuda::store_tiles_transposed(tiles(step), of_b[step]);
  sum_as_defined(tile, first_piece + static_cast<unsigned>(half) * 2,
                 static_cast<const M*>(p.a) + item.value_row * kMostRows, p.value_heads * kMostRows,
                 item.chunk.rows, p.lower);
}

// A tile's rows, each by 16 lanes: whole lines, written through, which takes 1 % off __stcs.
__device__ inline void store_tile(int tile, bf16* out, std::int64_t stride, int rows) {
  const unsigned first = threadIdx.x / 16, piece = threadIdx.x % 16;
  bf16* to = out + first * stride + piece * 8;
  uint4 pieces[kMostRows / 8];
#pragma unroll
  for (unsigned i = 0; i < kMostRows / 8; ++i)
    pieces[i] = shared_at<uint4>(tile + swizzled(first + 8 * i, piece, kTilePitch));
#pragma unroll
  for (unsigned i = 0; i < kMostRows / 8; ++i, to += 8 * stride)
    if (static_cast<int>(first + 8 * i) < rows) __stwt(reinterpret_cast<uint4*>(to), pieces[i]);
}

// u is made while k is still on its way.
template <class M>
__global__ void __launch_bounds__(kThreads, kWarpgroupBlocks<M>)
    recompute_warpgroup(const Problem p) {
  using Shared = WarpgroupShared<M>;
  const Problem::Item item = p.item(blockIdx.x);
  const int rows = item.chunk.rows;
  if (rows == 0) return;
  const int row = static_cast<int>(threadIdx.x) % kMostRows;
  const bool of_decay = threadIdx.x >= kMostRows;
  const float gate =
      row < rows ? (of_decay ? p.g : p.beta)[item.value_row + row * p.value_heads] : 0.0f;
  if (rows == kMostRows && !p.lower) {
    copy_chunk<true, M>(p, item);
  } else {
    copy_chunk<false, M>(p, item);
  }
  shared_at<float>(Shared::kGates + static_cast<int>(threadIdx.x) * 4) =
      of_decay ? math::exp(gate) : gate;
  cuda::copy_async_wait<1>();
  cuda::fence_shared();
  __syncthreads();
  LaneGates beta, decay;
  load_gates(beta, Shared::kGates);
  load_gates(decay, Shared::kGates + Shared::kGateBytes);
  if constexpr (kMatrixParts < M >> 1) {
    __syncthreads();
    split_matrix<kMostRows, false>(Shared::kMatrix);
    cuda::fence_shared();
    __syncthreads();
  }
  const std::int64_t stride = p.value_heads * kWide, out = item.value_row * kWide;
  if (p.u != nullptr) {
#pragma unroll 1
    for (int half = 0; half < 2; ++half)
      multiply_columns<M, false>(p, item, Shared::kValues, half, beta, decay);
  }
  cuda::copy_async_wait<0>();
  __syncthreads();
  if (p.u != nullptr) store_tile(Shared::kValues, static_cast<bf16*>(p.u) + out, stride, rows);
  if (p.w == nullptr) return;
#pragma unroll 1
  for (int half = 0; half < 2; ++half)
    multiply_columns<M, true>(p, item, Shared::kKeys, half, beta, decay);
  __syncthreads();
  store_tile(Shared::kKeys, static_cast<bf16*>(p.w) + out, stride, rows);
}

template <class M>
Status run_warpgroup(const Op::Desc& d, const Op::Args& a, Stream stream) {
  const Problem p(d, a);
  return cuda::launch(
      Op::kName, recompute_warpgroup<M>,
      {.blocks = p.items, .threads = kThreads, .shared = WarpgroupShared<M>::kBytes},
      a.k.device.index, stream, p);
}

}  // namespace bittern::recompute
