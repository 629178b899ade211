// Rotations of rows in shared memory, of any length and kind: a warp to a row, or, of a dense
// rotation, a block to many rows. The bits are those of aura_tile.cuh (bittern/aura_desc.h).
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "bittern/aura_desc.h"
#include "cuda/runtime.cuh"
#include "ops/aura/aura.h"
#include "ops/aura/aura_lanes.cuh"

namespace bittern::cuda {

// ---- a warp to a row ----

// A rotation, as a kernel's parameter.
struct RowRotation {
  const float* table = nullptr;
  Rotation kind = Rotation::identity;
  bool inverse = false;
  int dim = 0, factor = 1, block = 0;  // d, m, n
  float scale = 1;                     // d^-1/2
  // H_m, or its transpose if `inverse`: bit c of negative[a] is set where entry [a, c] is -1.
  std::uint64_t negative[60] = {};
};

inline RowRotation row_rotation(Rotation kind, std::int64_t dim, const float* table, bool inverse) {
  RowRotation r{.table = table, .kind = kind, .inverse = inverse, .dim = static_cast<int>(dim)};
  if (kind != Rotation::hadamard) return r;
  r.factor = static_cast<int>(hadamard_factor(dim));
  r.block = r.dim / r.factor;
  r.scale = hadamard_scale(dim);
  const float* h = hadamard_matrix(r.factor);
  for (int a = 0; a < r.factor; ++a)
    for (int c = 0; c < r.factor; ++c)
      if (h[inverse ? c * r.factor + a : a * r.factor + c] < 0)
        r.negative[a] |= std::uint64_t{1} << c;
  return r;
}

// P (factor row), or its inverse, of a row in shared memory where lane l has written the elements
// of j % 32 = l. The result is in `row` or in `spare`, which holds as much: the one that is
// returned. Any lane may read it. A lane has kEach elements in registers: with four instead of two,
// attend_splits took twice as many registers, and half as many warps.
template <int kEach = 2>
__device__ inline float* rotate_by_warp(const RowRotation& p, float* row, float* spare,
                                        float factor = 1) {
  const int lane = lane_index();
  const float scale = factor * (p.kind == Rotation::hadamard ? p.scale : 1);
  const bool has_signs = p.kind == Rotation::hadamard && !p.inverse;
#pragma unroll 4
  for (int j = lane; j < p.dim; j += 32) row[j] *= has_signs ? __ldg(p.table + j) * scale : scale;
  __syncwarp();
  if (p.kind == Rotation::identity) return row;
  if (p.kind == Rotation::dense) {
    const std::int64_t step = p.inverse ? p.dim : 1;
    for (int i = lane; i < p.dim; i += 32) {
      const float* matrix = p.table + std::int64_t{i} * (p.inverse ? 1 : p.dim);
      float acc = 0;
      for (int j = 0; j < p.dim; ++j) acc = fmaf(__ldg(matrix + j * step), row[j], acc);
      spare[i] = acc;
    }
    __syncwarp();
    return spare;
  }
  const auto butterflies = [&] {
    // Those across less than kRun elements in registers.
    constexpr int kRun = 32 * kEach;
#pragma unroll 1
    for (int first = lane; first - lane < p.dim; first += kRun) {
      float x[kEach];
#pragma unroll
      for (int q = 0; q < kEach; ++q) x[q] = first + 32 * q < p.dim ? row[first + 32 * q] : 0.0f;
      butterfly_lanes(x, p.block);
#pragma unroll
      for (int q = 0; q < kEach; ++q)
        if (first + 32 * q < p.dim) row[first + 32 * q] = x[q];
    }
    __syncwarp();
    for (int h = kRun; h < p.block; h *= 2) {
      for (int i = lane; i < p.dim / 2; i += 32) {
        const int j = 2 * i - (i & (h - 1));  // i with a zero bit put in at h
        const float a = row[j], b = row[j + h];
        row[j] = a + b;
        row[j + h] = a - b;
      }
      __syncwarp();
    }
  };
  if (!p.inverse) butterflies();
  if (p.factor > 1) {
    for (int i = lane; i < p.dim; i += 32) {
      const int a = i / p.block, b = i & (p.block - 1);
      float acc = 0;
      for (int c = 0; c < p.factor; c += 4) {
        const auto h = static_cast<unsigned>(p.negative[a] >> c);
        const auto t = [&](int e) { return row[(c + e) * p.block + b]; };
        const auto differ = [&](int e, int f) { return ((h >> e ^ h >> f) & 1) != 0; };
        const float low = differ(0, 1) ? t(0) - t(1) : t(0) + t(1);
        const float high = differ(2, 3) ? t(2) - t(3) : t(2) + t(3);
        const float four = differ(0, 2) ? low - high : low + high;
        const float signed_four = (h & 1) != 0 ? -four : four;
        acc = c == 0 ? signed_four : acc + signed_four;
      }
      spare[i] = acc;
    }
    __syncwarp();
    float* const result = spare;
    spare = row;
    row = result;
  }
  if (p.inverse) {
    butterflies();
#pragma unroll 4
    for (int j = lane; j < p.dim; j += 32) row[j] *= __ldg(p.table + j);
    __syncwarp();
  }
  return row;
}

// ---- a block to many rows of a dense rotation ----

// Eight rows to a warp, P through shared memory in tiles of [32 j, 128 i]. A lane has the sums of 8
// rows x 4 columns i = lane + 32 q, so that 24 reads of shared memory feed 128 fma.
struct DenseBlock {
  static constexpr int kRows = 8;  // of a warp
  static constexpr int kDepth = 32, kWidth = 128, kTileStride = kWidth + 1;
  static constexpr int kTileBytes = (kDepth * kTileStride * 4 + 15) / 16 * 16;
  static constexpr int kMostWarps = 8;

  int stride;  // floats from row to row
  int warps;
  std::size_t shared;  // bytes

  // Of a kernel that keeps x and y for each row and `extra` bytes for each warp.
  static DenseBlock plan(int dim, int extra, int device) {
    DenseBlock b{.stride = (dim + 3) / 4 * 4};
    const int warp = 2 * kRows * b.stride * 4 + extra;
    const int room = static_cast<int>(limits(device).shared_per_block) - kTileBytes;
    b.warps = std::min(kMostWarps, room / warp);
    b.shared = static_cast<std::size_t>(kTileBytes + b.warps * warp);
    return b;
  }

  // y := P x, or its inverse, for the rows [kRows, stride] of each warp, by the whole block.
  __device__ void rotate(const RowRotation& p, const float* x, float* y, float* tile) const {
    const int lane = lane_index(), threads = static_cast<int>(blockDim.x);
    for (int first = 0; first < p.dim; first += kWidth) {
      const int width = p.dim - first < kWidth ? p.dim - first : kWidth;
      float acc[kRows][4] = {};
      for (int from = 0; from < p.dim; from += kDepth) {
        const int depth = p.dim - from < kDepth ? p.dim - from : kDepth;
        __syncthreads();
        // Along rows of the table: j for P, i for its transpose.
        for (int at = static_cast<int>(threadIdx.x); at < kDepth * kWidth; at += threads) {
          const int i = p.inverse ? at % kWidth : at / kDepth;
          const int j = p.inverse ? at / kWidth : at % kDepth;
          if (i >= width || j >= depth) continue;
          const std::int64_t row = p.inverse ? from + j : first + i;
          tile[j * kTileStride + i] =
              __ldg(p.table + row * p.dim + (p.inverse ? first + i : from + j));
        }
        __syncthreads();
        for (int j = 0; j < depth; j += 4) {
          float4 t[kRows];
#pragma unroll
          for (int r = 0; r < kRows; ++r)
            t[r] = *reinterpret_cast<const float4*>(x + r * stride + from + j);
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            if (j + k >= depth) break;
            float column[4];
#pragma unroll
            for (int q = 0; q < 4; ++q) column[q] = tile[(j + k) * kTileStride + lane + 32 * q];
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
              const float u = k == 0 ? t[r].x : k == 1 ? t[r].y : k == 2 ? t[r].z : t[r].w;
#pragma unroll
              for (int q = 0; q < 4; ++q) acc[r][q] = fmaf(column[q], u, acc[r][q]);
            }
          }
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int q = 0; q < 4; ++q)
          if (lane + 32 * q < width) y[r * stride + first + lane + 32 * q] = acc[r][q];
      }
    }
    __syncwarp();
  }
};

// A warp to a row serves small problems and whatever has no tile.
inline constexpr int kWarpsOfRows = 8;  // of a block of such warps
inline constexpr int kFewRows = 4;      // a multiprocessor: no more than these are left to them

}  // namespace bittern::cuda
