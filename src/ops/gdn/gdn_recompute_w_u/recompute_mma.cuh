// On tensor cores, by products of a warp (mma.sync). The operands are rounded where the header
// says, products are exact, and what differs is the order of the sums and that tensor cores
// truncate where fma rounds.
//
// The traffic takes several times as long as the products, so all that counts is to keep copies in
// flight: a block asks for all its tiles at once, several blocks share a multiprocessor, and one's
// work hides behind the others' copies.
//
//   warp        0 and 1 do u, 2 and 3 w, each in slabs of 64 columns (whole lines are written) of
//               all rows. No other warp reads these columns, so results take their place on the
//               way out, without a barrier.
//   k, v in f16 x = leading + rest in bf16, exactly
//
// Parts are multiplied smallest first, so the accumulator is still small and so is what truncation
// loses there; then 4 products of 16 terms of full size follow, each within 10.5 * 2^-24 of the sum
// of magnitudes where addends are aligned with two extra bits (sm_80: 8 of 8 terms, 6.5). That is
// 52 * 2^-24 at most, inside the header's bound.
//
// 0 * inf of a part, of the padding or above the diagonal would be NaN where the definition has
// none: columns with a result that is not finite are done again by the definition.
#pragma once
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "core/math.h"
#include "ops/gdn/gdn_recompute_w_u/recompute_tiles.cuh"

namespace bittern::recompute {

constexpr int kMmaSlab = 64;     // columns of a warp: summed in two halves,
constexpr int kMmaHalf = 32;     // which are
constexpr int kTilesAcross = 4;  // 16 x 8 tiles of the result

template <class X>
constexpr int kValueParts = std::is_same_v<X, f16> ? 2 : 1;
// Blocks whose registers must fit a multiprocessor. Shared memory has room for as many.
template <int kWidth, class X, class M>
constexpr int kBlocks = (kMatrixParts<M> * kValueParts<X> == 1  ? 5
                         : kMatrixParts<M> * kValueParts<X> < 6 ? 4
                                                                : 3) -
                        (kWidth == 0 ? 1 : 0)
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
                        - 1  // less shared memory, and other registers
#endif
    ;

// Bytes of shared memory: k's and v's tile, A's parts (in f32 it comes into the first two), beta
// and e^g.
struct Layout {
  int pitch;  // of a row of k's and v's tiles
  int values, matrix, gates, bytes;
  __host__ __device__ Layout(int widest, int chunk, int parts)
      : pitch((widest + 63) / 64 * 128),
        values(chunk * pitch),
        matrix(2 * values),
        gates(matrix + parts * chunk * kMatrixBytes),
        bytes(gates + 2 * kMostRows * static_cast<int>(sizeof(float))) {}
};

// b = X(x * beta), or X((x * beta) * decay), in x's place.
template <int kChunk, class X, bool kDecay>
__device__ void scale_tile(int tile, int pitch, int gates, int width) {
  constexpr int kTogether = kChunk / kRowsApart < 4 ? kChunk / kRowsApart : 4;
  const unsigned first_row = threadIdx.x / 16;
#pragma unroll
  for (unsigned first = first_row; first < kChunk; first += kTogether * kRowsApart) {
#pragma unroll
    for (unsigned piece = threadIdx.x % 16; piece < 32; piece += 16) {
      if (!has_piece(static_cast<int>(piece), width)) continue;
      uint4 x[kTogether];
#pragma unroll
      for (unsigned i = 0; i < kTogether; ++i)
        x[i] = shared_at<uint4>(tile + swizzled(first + i * kRowsApart, piece, pitch));
#pragma unroll
      for (unsigned i = 0; i < kTogether; ++i) {
        const unsigned row = first + i * kRowsApart;
        const float beta = shared_at<float>(gates + static_cast<int>(row * 4));
        const float decay =
            kDecay ? shared_at<float>(gates + static_cast<int>((kMostRows + row) * 4)) : 1.0f;
        const auto scale = [&](std::uint32_t pair) {
          const float2 of = unpack_pair<X>(pair);
          return kDecay ? cuda::store_pair<X>(of.x * beta * decay, of.y * beta * decay)
                        : cuda::store_pair<X>(of.x * beta, of.y * beta);
        };
        shared_at<uint4>(tile + swizzled(row, piece, pitch)) =
            make_uint4(scale(x[i].x), scale(x[i].y), scale(x[i].z), scale(x[i].w));
      }
    }
  }
}

// One product of a chunk and head: out = X(A b), through b's place.
template <int kChunk, class X, class M>
struct Product {
  static constexpr int kSteps = kChunk / 16;  // 16 x 16 tiles along an axis of A
  static constexpr int kPart = kChunk * kMatrixBytes;
  int a, b, pitch;  // A's parts, the largest first
  X* out;           // the result's row 0
  std::int64_t out_stride;
  int rows, width;
  bool lower;

  // Columns column .. column + kMmaSlab - 1, by one warp.
  __device__ void slab(int column) const {
    const unsigned lane = threadIdx.x % 32;
    int staged = 0;  // bit h: half h
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const int first = column + half * kMmaHalf;
      if (first < width) staged |= sum(first) << half;
    }
    __syncwarp();
    // Out in pieces: lane l has piece l % 8 of row l / 8 of 4, and reads several ahead.
    constexpr int kTogether = kChunk / 4 < 8 ? kChunk / 4 : 8;
    const unsigned mine = static_cast<unsigned>(column) / 8 + lane % 8;
    if (mine * 8 >= static_cast<unsigned>(width) || (staged >> lane / 4 % 2 & 1) == 0) return;
    auto* to = reinterpret_cast<char*>(out + lane / 8 * out_stride) + mine * kPiece;
    const std::int64_t apart = 4 * out_stride * static_cast<std::int64_t>(sizeof(X));
#pragma unroll
    for (unsigned first = lane / 8; first < kChunk; first += 4 * kTogether) {
      uint4 pieces[kTogether];
#pragma unroll
      for (unsigned i = 0; i < kTogether; ++i)
        pieces[i] = shared_at<uint4>(b + swizzled(first + 4 * i, mine, pitch));
#pragma unroll
      for (unsigned i = 0; i < kTogether; ++i) {
        if (static_cast<int>(first + 4 * i) < rows) __stcs(reinterpret_cast<uint4*>(to), pieces[i]);
        to += apart;
      }
    }
  }

  // Columns column .. column + kMmaHalf - 1, into b's place; or straight out, and 0.
  __device__ int sum(int column) const {
    const unsigned lane = threadIdx.x % 32;
    std::uint32_t of_b[kValueParts<X>][kSteps][kTilesAcross][2];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int tile = 0; tile < kTilesAcross; tile += 2) {
        std::uint32_t pairs[4];
        // Past the width's end lies the tile's own padding, which is not used.
        cuda::load_tiles_transposed(
            pairs, &shared_at<char>(
                       b + swizzled(16 * step + lane % 16, column / 8 + tile + lane / 16, pitch)));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if constexpr (kValueParts<X> == 1) {
            of_b[0][step][tile + i / 2][i % 2] = pairs[i];
          } else {
            const float2 x = unpack_pair<X>(pairs[i]);
            of_b[0][step][tile + i / 2][i % 2] =
                upper_halves(__float_as_uint(x.x), __float_as_uint(x.y));
            of_b[1][step][tile + i / 2][i % 2] = upper_halves(
                __float_as_uint(x.x - upper_half(x.x)), __float_as_uint(x.y - upper_half(x.y)));
          }
        }
      }
    }
    if constexpr (kValueParts < X >> 1) {  // inf * rest would be NaN where rest is 0
      std::uint32_t marks = 0;
      for (int tile = 0; tile < kSteps * kSteps; ++tile) {
        std::uint32_t of_a[4];
        load_matrix(of_a, 0, tile / kSteps, tile % kSteps);
        // Bit 15 or 31, if an element's exponent is all ones.
#pragma unroll
        for (int i = 0; i < 4; ++i) marks |= (of_a[i] & 0x7f807f80u) + 0x00800080u;
      }
      if (__any_sync(~0u, (marks & 0x80008000u) != 0)) {
        by_definition(column + static_cast<int>(lane));
        return 0;
      }
    }
    __syncwarp();  // every lane has read b, where the sums go
    // From the bottom: with a factor of b that is not finite, the last rows' sums are not.
#pragma unroll
    for (int down = kSteps - 1; down >= 0; --down) {
      float sums[kTilesAcross][4] = {};
      bool finite = true;
#pragma unroll
      for (int part = kMatrixParts<M> - 1; part >= 0; --part) {
#pragma unroll
        for (int n = kValueParts<X> - 1; n >= 0; --n) {
#pragma unroll
          for (int step = 0; step < kSteps; ++step) {
            std::uint32_t of_a[4];
            load_matrix(of_a, part, down, step);
#pragma unroll
            for (int tile = 0; tile < kTilesAcross; ++tile)
              cuda::multiply_bf16(sums[tile], of_a, of_b[n][step][tile]);
          }
        }
      }
      if (down == kSteps - 1) {
#pragma unroll
        for (int tile = 0; tile < kTilesAcross; ++tile)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            if (column + 8 * tile < width) finite = finite && fabsf(sums[tile][i]) < INFINITY;
        if (!__all_sync(~0u, finite)) {
          by_definition(column + lane);
          return 0;
        }
      }
#pragma unroll
      for (int tile = 0; tile < kTilesAcross; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = 16 * down + 8 * half + lane / 4;
          shared_at<std::uint32_t>(b + swizzled(row, column / 8 + tile, pitch) + lane % 4 * 4) =
              cuda::store_pair<X>(sums[tile][2 * half], sums[tile][2 * half + 1]);
        }
      }
    }
    return 1;
  }

  // This lane's elements of the 16 x 16 tile (down, across) of a part of A.
  __device__ void load_matrix(std::uint32_t (&to)[4], int part, int down, int across) const {
    const unsigned lane = threadIdx.x % 32;
    cuda::load_tiles(to, &shared_at<char>(a + part * kPart +
                                          swizzled(16 * down + lane % 16, 2 * across + lane / 16,
                                                   kMatrixBytes)));
  }

  __device__ void by_definition(int column) const {
    if (column >= width) return;
    for (int i = 0; i < rows; ++i) {
      float acc = 0;
      for (int j = 0; j < (lower ? i + 1 : rows); ++j) {
        float factor = 0;
        for (int part = kMatrixParts<M> - 1; part >= 0; --part)
          factor += cuda::load_math(
              shared_at<bf16>(a + part * kPart + swizzled(i, j / 8, kMatrixBytes) + j % 8 * 2));
        const X x = shared_at<X>(b + swizzled(j, column / 8, pitch) + column % 8 * 2);
        acc = std::fma(factor, cuda::load_math(x), acc);
      }
      out[i * out_stride + column] = cuda::store_math<X>(acc);
    }
  }
};

// kWidth: key_dim and value_dim, when they are kWide; otherwise 0.
template <int kChunk, int kWidth, class X, class M>
__global__ void __launch_bounds__(kThreads, kBlocks<kWidth, X, M>) recompute_mma(const Problem p) {
  const int key_dim = kWidth > 0 ? kWidth : p.key_dim;
  const int value_dim = kWidth > 0 ? kWidth : p.value_dim;
  const Layout layout(max(key_dim, value_dim), kChunk, kMatrixParts<M>);
  constexpr int kKeys = 0;
  for (std::int64_t index = blockIdx.x; index < p.items; index += gridDim.x) {
    const Problem::Item item = p.item(index);
    const int rows = item.chunk.rows;
    if (rows == 0) continue;
    copy_matrix<kChunk>(p, layout.matrix, static_cast<const M*>(p.a) + item.value_row * kChunk,
                        rows);
    if (p.u != nullptr) {
      copy_tile<kChunk>(layout.values, layout.pitch,
                        static_cast<const X*>(p.v) + item.value_row * value_dim,
                        p.value_heads * value_dim, rows, value_dim);
    }
    if (p.w != nullptr) {
      copy_tile<kChunk>(kKeys, layout.pitch, static_cast<const X*>(p.k) + item.key_row * key_dim,
                        p.key_heads * key_dim, rows, key_dim);
    }
    cuda::copy_async_commit();
    if (const int row = static_cast<int>(threadIdx.x); row < kChunk) {
      const std::int64_t at = item.value_row + row * p.value_heads;
      shared_at<float>(layout.gates + row * 4) = row < rows ? p.beta[at] : 0.0f;
      shared_at<float>(layout.gates + (kMostRows + row) * 4) =
          row < rows ? math::exp(p.g[at]) : 0.0f;
    }
    cuda::copy_async_wait<0>();
    __syncthreads();
    if (p.u != nullptr)
      scale_tile<kChunk, X, false>(layout.values, layout.pitch, layout.gates, value_dim);
    if (p.w != nullptr) scale_tile<kChunk, X, true>(kKeys, layout.pitch, layout.gates, key_dim);
    if constexpr (kMatrixParts < M >> 1) split_matrix<kChunk, true>(layout.matrix);
    __syncthreads();
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const bool of_keys = warp >= 2;
    void* const out = of_keys ? p.w : p.u;
    if (out != nullptr) {
      const int width = of_keys ? key_dim : value_dim;
      const Product<kChunk, X, M> product{.a = layout.matrix,
                                          .b = of_keys ? kKeys : layout.values,
                                          .pitch = layout.pitch,
                                          .out = static_cast<X*>(out) + item.value_row * width,
                                          .out_stride = p.value_heads * width,
                                          .rows = rows,
                                          .width = width,
                                          .lower = p.lower};
      for (int column = warp % 2 * kMmaSlab; column < width; column += 2 * kMmaSlab)
        product.slab(column);
    }
    __syncthreads();
  }
}

template <class X, class M>
Status run_mma(const Op::Desc& d, const Op::Args& a, Stream stream) {
  const Problem p(d, a);
  const auto launch = [&](void (*kernel)(Problem)) {
    const Layout layout(std::max(p.key_dim, p.value_dim), d.chunk, kMatrixParts<M>);
    return cuda::launch(
        Op::kName, kernel,
        {.blocks = p.items, .threads = kThreads, .shared = static_cast<std::size_t>(layout.bytes)},
        a.k.device.index, stream, p);
  };
  if (d.chunk == 64 && d.key_dim == kWide && d.value_dim == kWide)
    return launch(recompute_mma<64, kWide, X, M>);
  if (d.chunk == 64) return launch(recompute_mma<64, 0, X, M>);
  if (d.chunk == 32) return launch(recompute_mma<32, 0, X, M>);
  return launch(recompute_mma<16, 0, X, M>);
}

}  // namespace bittern::recompute
