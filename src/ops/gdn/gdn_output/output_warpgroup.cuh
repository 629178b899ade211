// On tensor cores, by products of a warpgroup (sm_90a): f16 and bf16, keys of 64 or 128, chunks of
// 64. A block has a chunk of one value head, with its 128 values or 64 of them, and a warp 16 of
// its tokens:
//
//   P = X((q k^T) e^(g[i] - g[j]));   o = scale (e^g (q h) + P v_new)
//
// q is read to registers once. v_new comes to where k was, and o to where q was, so that three
// blocks have room on a multiprocessor.
//
// What is not finite in v_new would be multiplied by the zeros of P above its diagonal. So a warp
// that finds a result which is not finite computes its rows again, as the header has them.
#pragma once
#include "ops/gdn/chunk_tokens.cuh"
#include "ops/gdn/gdn_output/output_device.cuh"

namespace bittern::output {

using chunk_forward::kPart;
using chunk_forward::kPiece;
using chunk_forward::kRowBytes;
using chunk_forward::kWide;
using chunk_forward::shared_at;
using chunk_forward::TokenPairs;
using chunk_forward::TokenSums;

constexpr int kGroupThreads = chunk_forward::kGroupThreads;

// kValues: all values of a head if they are kWide, else those of a block.
template <int kKeyDim, int kValues>
struct Widths {
  const Problem& p;
  const Problem::Item& item;
  __device__ std::int64_t value_dim() const { return kValues == kWide ? kWide : p.d.value_dim; }
  __device__ int first_value() const { return kValues == kWide ? 0 : item.part * kValues; }
  // Elements to the block's first value of a tensor of values, and of the state.
  __device__ std::int64_t value_at() const { return item.first * value_dim() + first_value(); }
  __device__ std::int64_t state_at(bool key_first) const {
    return item.state_at + first_value() * (key_first ? 1 : kKeyDim);
  }
};

struct WarpgroupShared {
  static constexpr int kQueries = 0, kKeys = 2 * kPart, kState = 4 * kPart, kGates = 8 * kPart;
  static constexpr int kValues = kKeys, kOutput = kQueries;  // in their place
  static constexpr int kBytes = kGates + kMostRows * static_cast<int>(sizeof(float));
};

// The state's rows, in parts of 64 columns.
template <int kRows>
constexpr int kStatePart = kRows * kRowBytes;
template <int kRows, int kColumns, class X>
__device__ void copy_state(int to, const X* from, std::int64_t stride) {
  constexpr int kAcross = kColumns / 8, kDown = kGroupThreads / kAcross;
  const int row = static_cast<int>(threadIdx.x) / kAcross;
  const int piece = static_cast<int>(threadIdx.x) % kAcross;
  static_assert(kDown % 8 == 0);  // rows permute their pieces alike
  char* const place = &shared_at<char>(to + piece / 8 * kStatePart<kRows> + row * kRowBytes +
                                       ((piece % 8) ^ (row % 8)) * kPiece);
  const X* const at = from + row * stride + piece * 8;
#pragma unroll
  for (int i = 0; i < kRows / kDown; ++i)
    cuda::copy_async_16(place + i * kDown * kRowBytes, at + i * kDown * stride);
}

// The results of a warp's rows by the header's sums.
template <class X, int kKeyDim, int kValues>
__device__ __noinline__ void sum_as_defined(const Problem& p, const Problem::Item& item) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const X* const q = static_cast<const X*>(p.q) + item.key_at;
  const X* const k = static_cast<const X*>(p.k) + item.key_at;
  const Widths<kKeyDim, kValues> widths{p, item};
  const bool key_first = p.d.state_layout == StateLayout::key_value;
  const X* const h = static_cast<const X*>(p.h) + widths.state_at(key_first);
  const X* const v = static_cast<const X*>(p.v_new) + widths.value_at();
  const std::int64_t key_stride = p.d.key_heads * kKeyDim, value_dim = widths.value_dim();
  const auto gate = [&](int i) { return p.g[item.first + i * p.d.value_heads]; };
  __syncwarp();
  for (int i = 16 * warp; i < min(16 * warp + 16, item.chunk.rows); ++i) {
    const auto query = [&](int m) { return cuda::load_math(q[i * key_stride + m]); };
    float pairs[2] = {};
    for (int half = 0; half < 2; ++half) {
      const int j = lane + 32 * half;
      if (j > i) continue;
      float dot = 0;
      for (int m = 0; m < kKeyDim; ++m)
        dot = std::fma(query(m), cuda::load_math(k[j * key_stride + m]), dot);
      pairs[half] = cuda::load_math(cuda::store_math<X>(dot * gdn_decay(gate(i), gate(j))));
    }
    for (int c = lane; c < kValues; c += 32) {
      float sum = 0;
      for (int m = 0; m < kKeyDim; ++m)
        sum = std::fma(query(m),
                       cuda::load_math(h[key_first ? m * value_dim + c : c * kKeyDim + m]), sum);
      sum = math::exp(gate(i)) * sum;
      for (int j = 0; j <= i; ++j)
        sum = std::fma(__shfl_sync(~0u, j < 32 ? pairs[0] : pairs[1], j % 32),
                       cuda::load_math(v[j * p.d.value_heads * value_dim + c]), sum);
      shared_at<X>(WarpgroupShared::kOutput + cuda::tile_place(i, c / 8) + c % 8 * 2) =
          cuda::store_math<X>(p.scale * sum);
    }
  }
}

// Rows of o out of their tile.
template <int kValues, class X>
__device__ void store_rows(X* out, std::int64_t stride, int rows) {
  constexpr int kAcross = kValues / 8, kDown = kGroupThreads / kAcross;
  const int row = static_cast<int>(threadIdx.x) / kAcross;
  const int piece = static_cast<int>(threadIdx.x) % kAcross;
  const int from = WarpgroupShared::kOutput + cuda::tile_place(row, piece);
  X* to = out + row * stride + piece * 8;
  uint4 pieces[kMostRows / kDown];
#pragma unroll
  for (int i = 0; i < kMostRows / kDown; ++i)
    pieces[i] = shared_at<uint4>(from + i * kDown * kRowBytes);
#pragma unroll
  for (int i = 0; i < kMostRows / kDown; ++i, to += kDown * stride)
    if (row + i * kDown < rows) __stcs(reinterpret_cast<uint4*>(to), pieces[i]);
}

// kKeyFirst: the state's layout.
template <class X, bool kKeyFirst, int kKeyDim, int kValues>
__global__ void __launch_bounds__(kGroupThreads, 3)
    output_warpgroup(const __grid_constant__ Problem p) {
  using namespace chunk_forward;
  using Shared = WarpgroupShared;
  constexpr int kSteps = kKeyDim / 16, kHalves = kValues / 64;
  constexpr float kLog2E = 0x1.715476p0f;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const output::Problem::Item item = p.item(blockIdx.x);
  const int rows = item.chunk.rows;
  if (rows == 0) return;
  const Widths<kKeyDim, kValues> widths{p, item};
  const std::int64_t key_stride = p.d.key_heads * kKeyDim;
  const std::int64_t value_stride = p.d.value_heads * widths.value_dim();
  const X* const v = static_cast<const X*>(p.v_new) + widths.value_at();
  copy_rows<kKeyDim>(Shared::kQueries, static_cast<const X*>(p.q) + item.key_at, key_stride, rows,
                     nullptr);
  copy_rows<kKeyDim>(Shared::kKeys, static_cast<const X*>(p.k) + item.key_at, key_stride, rows,
                     nullptr);
  cuda::copy_async_commit();
  constexpr int kStateRows = kKeyFirst ? kKeyDim : kValues;
  copy_state<kStateRows, kKeyFirst ? kValues : kKeyDim>(
      Shared::kState, static_cast<const X*>(p.h) + widths.state_at(kKeyFirst),
      kKeyFirst ? widths.value_dim() : kKeyDim);
  cuda::copy_async_commit();
  if (thread / 2 < rows)
    cuda::prefetch_l2(v + thread / 2 * value_stride + thread % 2 * kValues / 2);
  auto* const gates = &shared_at<float>(Shared::kGates);
  if (thread < kMostRows)
    gates[thread] = thread < rows ? p.g[item.first + thread * p.d.value_heads] : 0.0f;
  cuda::copy_async_wait<1>();
  cuda::fence_shared();
  __syncthreads();

  const int place = lane_place<false>() + 16 * warp * kRowBytes;  // of the lane's rows
  const auto tiles = [&](int tile, int step) {
    return &shared_at<char>(tile + step / 4 * kPart + (place ^ (step % 4 * 32)));
  };
  std::uint32_t q[kSteps][4];
#pragma unroll
  for (int s = 0; s < kSteps; ++s) cuda::load_tiles(q[s], tiles(Shared::kQueries, s));
  const auto matrix = [](int at) { return cuda::warpgroup_matrix(&shared_at<char>(at)); };
  const auto keys = matrix(Shared::kKeys);
  TokenSums sums;
  cuda::warpgroup_begin();
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
    multiply_tokens<X>(sums, q[s], keys.at(s / 4 * kPart + s % 4 * 32), s > 0);
  cuda::warpgroup_commit();
  cuda::warpgroup_wait<0>();
  cuda::warpgroup_hold(sums);
  __syncthreads();
  copy_rows<kValues>(Shared::kValues, v, value_stride, rows, nullptr);
  cuda::copy_async_commit();

  const int row = 16 * warp + lane / 4;
  const float own[2] = {gates[row], gates[row + 8]};
  TokenPairs pairs;
#pragma unroll
  for (int t = 0; t < kTokenTiles; ++t) {
    const auto other = *reinterpret_cast<const float2*>(gates + 8 * t + 2 * (lane % 4));
#pragma unroll
    for (int down = 0; down < 2; ++down) {
      float pair[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int j = 8 * t + 2 * (lane % 4) + e;
        const float decay =
            cuda::approximate_exp2((own[down] - (e == 0 ? other.x : other.y)) * kLog2E);
        // Beyond the diagonal decays may be infinite.
        pair[e] = j <= row + 8 * down ? sums[4 * t + 2 * down + e] * decay : 0.0f;
      }
      pairs[t / 2][t % 2 * 2 + down] = cuda::store_pair<X>(pair[0], pair[1]);
    }
  }
  cuda::copy_async_wait<1>();
  cuda::fence_shared();
  __syncthreads();
  TokenSums o[kHalves];  // of the values
  const auto state = matrix(Shared::kState);
  cuda::warpgroup_begin();
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if constexpr (kKeyFirst) {
        multiply_token_rows<X>(o[half], q[s],
                               state.at(half * kStatePart<kStateRows> + s * 16 * kRowBytes), s > 0);
      } else {
        multiply_tokens<X>(o[half], q[s],
                           state.at(s / 4 * kStatePart<kStateRows> + half * kPart + s % 4 * 32),
                           s > 0);
      }
    }
  }
  cuda::warpgroup_commit();
  const float decay[2] = {cuda::approximate_exp2(own[0] * kLog2E),
                          cuda::approximate_exp2(own[1] * kLog2E)};
  cuda::warpgroup_wait<0>();
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    cuda::warpgroup_hold(o[half]);
#pragma unroll
    for (int i = 0; i < 4 * kTokenTiles; ++i) o[half][i] *= decay[i / 2 % 2];
  }
  cuda::copy_async_wait<0>();
  cuda::fence_shared();
  __syncthreads();
  const auto values = matrix(Shared::kValues);
  cuda::warpgroup_begin();
#pragma unroll
  for (int half = 0; half < kHalves; ++half)
#pragma unroll
    for (int s = 0; s < kMostRows / 16; ++s)
      multiply_token_rows<X>(o[half], pairs[s], values.at(half * kPart + s * 16 * kRowBytes), true);
  cuda::warpgroup_commit();
  cuda::warpgroup_wait<0>();
  float zero = 0;  // as long as all results are finite
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    cuda::warpgroup_hold(o[half]);
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      std::uint32_t out[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float first = o[half][8 * s + 2 * i] * p.scale;
        const float second = o[half][8 * s + 2 * i + 1] * p.scale;
        zero = std::fma(first, 0.0f, std::fma(second, 0.0f, zero));
        out[i] = cuda::store_pair<X>(first, second);
      }
      cuda::store_tiles(tiles(Shared::kOutput, 4 * half + s), out);
    }
  }
  if (__any_sync(~0u, !(zero == 0))) sum_as_defined<X, kKeyDim, kValues>(p, item);
  __syncthreads();
  store_rows<kValues>(static_cast<X*>(p.o) + widths.value_at(), value_stride, rows);
}

template <class X>
Status run_warpgroup(const Op::Desc& d, const Op::Args& a, Stream stream) {
  const auto run = [&]<int kKeyDim, int kValues>(std::integral_constant<int, kKeyDim>,
                                                 std::integral_constant<int, kValues>) {
    const Problem p(d, a, d.value_dim / kValues);
    return cuda::launch(
        Op::kName,
        d.state_layout == StateLayout::key_value ? output_warpgroup<X, true, kKeyDim, kValues>
                                                 : output_warpgroup<X, false, kKeyDim, kValues>,
        {.blocks = p.items, .threads = kGroupThreads, .shared = WarpgroupShared::kBytes},
        a.o.device.index, stream, p);
  };
  constexpr std::integral_constant<int, kWide> kAll;
  if (d.key_dim == kWide && d.value_dim == kWide) return run(kAll, kAll);
  return chunk_forward::with_key_dim(
      d, [&](auto key_dim) { return run(key_dim, std::integral_constant<int, kWide / 2>()); });
}

}  // namespace bittern::output
