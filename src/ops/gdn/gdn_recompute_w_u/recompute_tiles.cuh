// Tiles of k, v and A in shared memory, for the kernels on tensor cores.
//
//   tile        rows of 16-bit elements in shared memory, in pieces of 16 bytes, swizzled; zeros
//               past the chunk's end. k and v are scaled and rounded where they lie.
//   A in f32    a = high + middle + low, the significand's first, second and last 8 bits: exact
//               down to 2^-109, and within 2^-133 below
#pragma once
#include "cuda/ptx.cuh"
#include "ops/gdn/gdn_recompute_w_u/recompute_device.cuh"

namespace bittern::recompute {

constexpr int kPiece = 16;         // bytes
constexpr int kMatrixBytes = 128;  // of a row of a part of A, whatever the chunk
constexpr int kWide = 128;         // the width with constant addresses

template <class M>
constexpr int kMatrixParts = sizeof(M) == 4 ? 3 : 1;

// Where a piece lies. Every eight rows permute the pieces of 128 bytes among themselves: a column
// of pieces meets every bank.
__device__ inline int swizzled(unsigned row, unsigned piece, int pitch) {
  return static_cast<int>(row * static_cast<unsigned>(pitch) + ((piece ^ (row & 7)) * kPiece));
}

template <class T>
__device__ T& shared_at(int place) {
  return *reinterpret_cast<T*>(cuda::dynamic_shared<char>() + place);
}

// What each thread copies of a tile, and then scales: pieces t % 16, t % 16 + 16.. of rows t / 16,
// t / 16 + kRowsApart..
constexpr int kRowsApart = kThreads / 16;
__device__ inline bool has_piece(int piece, int width) {
  return width % kWide == 0 ? piece / 16 * kWide < width : piece * 8 < width;
}

// kFull: the chunk has all its rows.
template <int kChunk, bool kFull = false, class X>
__device__ void copy_tile(int tile, int pitch, const X* from, std::int64_t stride, int rows,
                          int width) {
  const unsigned first_row = threadIdx.x / 16, first_piece = threadIdx.x % 16;
  const auto* at = reinterpret_cast<const char*>(from + first_row * stride) + first_piece * kPiece;
#pragma unroll
  for (unsigned turn = 0; turn < kChunk / kRowsApart; ++turn) {
    const unsigned row = turn * kRowsApart + first_row;
#pragma unroll
    for (unsigned piece = first_piece; piece < 32; piece += 16)
      if (has_piece(static_cast<int>(piece), width))
        cuda::copy_async_16(
            &shared_at<char>(tile + swizzled(row, piece, pitch)),
            at + (piece - first_piece) * kPiece,
            kFull || static_cast<int>(row) < rows ? kPiece : 0);  // 0: not even looked at
    at += kRowsApart * stride * static_cast<std::int64_t>(sizeof(X));
  }
}

// Where a piece of A in f32 comes: the first half of each row into its row of the first part, the
// second half into the second part's.
template <int kChunk>
__device__ inline int raw_place(unsigned row, unsigned piece) {
  return static_cast<int>((piece / 8 * kChunk + row) * kMatrixBytes +
                          (piece % 8 ^ piece / 8) * kPiece);
}

// The elements of A that count, zeros for the others. kFull: all of them count.
template <int kChunk, bool kFull = false, class M>
__device__ void copy_matrix(const Problem& p, int to, const M* from, int rows) {
  constexpr unsigned kElements = kPiece / sizeof(M), kPieces = kMostRows / kElements;
  constexpr unsigned kAtOnce = kThreads / kPieces;
  const unsigned first_row = threadIdx.x / kPieces, piece = threadIdx.x % kPieces;
  if (piece * kElements >= kChunk) return;
  const M* at = from + first_row * p.value_heads * kChunk + piece * kElements;
#pragma unroll
  for (unsigned turn = 0; turn < kChunk / kAtOnce; ++turn) {
    const unsigned row = turn * kAtOnce + first_row;
    const int terms = p.terms(static_cast<int>(row), rows) - static_cast<int>(piece * kElements);
    cuda::copy_async_16(
        &shared_at<char>(to + (sizeof(M) == 4 ? raw_place<kChunk>(row, piece)
                                              : swizzled(row, piece, kMatrixBytes))),
        at, kFull ? kPiece : max(0, min(terms * static_cast<int>(sizeof(M)), kPiece)));
    at += kAtOnce * p.value_heads * kChunk;
  }
}

// The upper halves of two words: of f32 whose lower halves are 0, a pair of bf16.
__device__ inline std::uint32_t upper_halves(std::uint32_t x, std::uint32_t y) {
  return __byte_perm(x, y, 0x7632);
}
__device__ inline float upper_half(float x) {
  return __uint_as_float(__float_as_uint(x) & 0xffff0000u);
}

// A as it came becomes its three parts, row by row: the lanes that have read a row write it.
// kClean: what is not finite has itself and zeros as parts, or else NaN among them.
template <int kChunk, bool kClean>
__device__ void split_matrix(int a) {
  constexpr unsigned kAtOnce = kThreads / 8;  // a lane has 8 elements of a row
  const unsigned piece = threadIdx.x % 8;
#pragma unroll
  for (unsigned turn = 0; turn < kChunk / kAtOnce; ++turn) {
    const unsigned row = turn * kAtOnce + threadIdx.x / 8;
    float4 raw[2];
#pragma unroll
    for (unsigned i = 0; i < 2; ++i)
      raw[i] = shared_at<float4>(a + raw_place<kChunk>(row, 2 * piece + i));
    __syncwarp();
    std::uint32_t part[3][8];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float4& four = raw[e / 4];
      const float x = e % 4 == 0 ? four.x : e % 4 == 1 ? four.y : e % 4 == 2 ? four.z : four.w;
      const bool finite = !kClean || fabsf(x) < INFINITY;
      const float rest = finite ? x - upper_half(x) : 0.0f;
      part[0][e] = kClean && isnan(x) ? 0x7fc00000u : __float_as_uint(x);
      part[1][e] = __float_as_uint(rest);
      part[2][e] = __float_as_uint(rest - upper_half(rest));
    }
    if (piece * 8 < kChunk) {
#pragma unroll
      for (int n = 0; n < 3; ++n)
        shared_at<uint4>(a + n * kChunk * kMatrixBytes + swizzled(row, piece, kMatrixBytes)) =
            make_uint4(upper_halves(part[n][0], part[n][1]), upper_halves(part[n][2], part[n][3]),
                       upper_halves(part[n][4], part[n][5]), upper_halves(part[n][6], part[n][7]));
    }
  }
}

// Two elements of a register, the first in the lower half.
template <class X>
__device__ float2 unpack_pair(std::uint32_t bits) {
  return make_float2(cuda::load_math(X{static_cast<std::uint16_t>(bits)}),
                     cuda::load_math(X{static_cast<std::uint16_t>(bits >> 16)}));
}

}  // namespace bittern::recompute
