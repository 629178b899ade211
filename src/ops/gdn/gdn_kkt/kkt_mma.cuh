// On tensor cores, by products of a warp: f16 and bf16, keys of 64 or 128, chunks of 64. Four
// warps share k k^T, a tile of 16 rows each (chunk_prepare.cuh), and make L of it for one value
// head after the other.
#pragma once
#include "ops/gdn/chunk_prepare.cuh"
#include "ops/gdn/gdn_kkt/kkt_device.cuh"

namespace bittern::kkt {

constexpr int kMmaThreads = chunk_forward::kCopyThreads;

struct MmaShared {
  static constexpr int kKeys = chunk_forward::PrepareShared::kKeys;
  static constexpr int kGates = kKeys + 2 * chunk_forward::kPart;  // g, then beta
  static constexpr int kBytes = kGates + 2 * kMostRows * static_cast<int>(sizeof(float));
};

// Columns 16 block.. of the warp's rows, all below the diagonal if kBelow; beyond it decays may be
// infinite. Lanes exchange what they have of two tiles, so that each writes four neighbours.
template <bool kBelow>
__device__ void put_block(const Problem& p, float* to, const float* gates, int rows, int block,
                          const float (&kk)[2][4]) {
  constexpr float kLog2E = 0x1.715476p0f;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int pair = 2 * (lane % 4);
  const bool odd = lane % 2 != 0;
#pragma unroll
  for (int down = 0; down < 2; ++down) {
    const int i = 16 * warp + lane / 4 + 8 * down;
    const float g = gates[i], beta = gates[kMostRows + i];
    float l[2][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto other = *reinterpret_cast<const float2*>(gates + 16 * block + 8 * half + pair);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float decay = cuda::approximate_exp2((g - (e == 0 ? other.x : other.y)) * kLog2E);
        const bool counts = kBelow || 16 * block + 8 * half + pair + e < i;
        l[half][e] = counts ? beta * kk[half][2 * down + e] * decay : 0.0f;
      }
    }
    const float first = __shfl_xor_sync(~0u, odd ? l[0][0] : l[1][0], 1);
    const float second = __shfl_xor_sync(~0u, odd ? l[0][1] : l[1][1], 1);
    const float4 four = odd ? make_float4(first, second, l[1][0], l[1][1])
                            : make_float4(l[0][0], l[0][1], first, second);
    const int column = 16 * block + (odd ? 8 + pair - 2 : pair);
    if (i < rows)
      __stcs(reinterpret_cast<float4*>(to + i * p.d.value_heads * kMostRows + column), four);
  }
}

template <class X, int kKeyDim>
__global__ void __launch_bounds__(kMmaThreads, 5) kkt_mma(const __grid_constant__ Problem p) {
  using namespace chunk_forward;
  using Shared = MmaShared;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  const int sharing = static_cast<int>(p.d.value_heads / p.d.key_heads);
  for (std::int64_t index = blockIdx.x; index < p.items; index += gridDim.x) {
    const kkt::Problem::Item item = p.item(index);
    const int rows = item.chunk.rows;
    if (rows == 0) continue;
    __syncthreads();
    copy_rows<kKeyDim>(Shared::kKeys, static_cast<const X*>(p.k) + p.keys_at(item),
                       p.d.key_heads * kKeyDim, rows, nullptr);
    cuda::copy_async_commit();
    const int row = thread % kMostRows;
    const auto gate = [&](int i) {
      const float* from = thread < kMostRows ? p.g : p.beta;
      return row < rows ? from[p.gates_at(item, i) + row * p.d.value_heads] : 0.0f;
    };
    float next = gate(0);
    cuda::copy_async_wait<0>();
    __syncthreads();
    float kk[4][2][4] = {}, none[4][2][4];
    multiply_pairs<X, kKeyDim, false>(lane_place<false>() + 16 * warp * kRowBytes, 0, warp + 1, kk,
                                      none);
    float* const gates = &shared_at<float>(Shared::kGates);
#pragma unroll 1
    for (int i = 0; i < sharing; ++i) {
      __syncthreads();
      gates[thread] = next;
      __syncthreads();
      if (i + 1 < sharing) next = gate(i + 1);
      float* const to = p.l + p.gates_at(item, i) * kMostRows;
#pragma unroll
      for (int block = 0; block < 4; ++block) {
        if (block < warp) {
          put_block<true>(p, to, gates, rows, block, kk[block]);
        } else {
          put_block<false>(p, to, gates, rows, block, kk[block]);
        }
      }
    }
  }
}

template <class X>
Status run_mma(const Op::Desc& d, const Op::Args& a, Stream stream) {
  const Problem p(d, a);
  return chunk_forward::with_key_dim(d, [&]<int kKeyDim>(std::integral_constant<int, kKeyDim>) {
    return cuda::launch(Op::kName, kkt_mma<X, kKeyDim>,
                        {.blocks = p.items, .threads = kMmaThreads, .shared = MmaShared::kBytes},
                        a.l.device.index, stream, p);
  });
}

}  // namespace bittern::kkt
