// Products fma by fma, as the headers define them, by a block of kThreads: thread t has rows
// 4 (t / 16).. and kWidth columns from t % 16 * kWidth on. Factors are in shared memory.
#pragma once
#include <cmath>
#include <cstdint>

#include "cuda/device.cuh"

namespace bittern::exact {

constexpr int kThreads = 256;
constexpr int kSide = 16;      // threads along each side of a product
constexpr int kTile = 4;       // rows of a thread
constexpr int kMostRows = 64;  // of a chunk
constexpr int kSlab = 32;      // keys at a time, so that every length of a key fits
constexpr int kPitch = kMostRows + 4;

__device__ inline int first_row() { return static_cast<int>(threadIdx.x) / kSide * kTile; }
template <int kWidth = kTile>
__device__ int first_column() {
  return static_cast<int>(threadIdx.x) % kSide * kWidth;
}

// sums[r][e] = fma(a[m][row + r], b[m][column + e], sums[r][e]) for m = 0 .. n - 1, where rows m of
// a and b are kAPitch and kBPitch apart.
template <int kAPitch, int kBPitch, int kWidth>
__device__ void add_products(float (&sums)[kTile][kWidth], const float* a, const float* b, int n) {
  a += first_row();
  b += first_column<kWidth>();
  for (int m = 0; m < n; ++m, a += kAPitch, b += kBPitch) {
#pragma unroll
    for (int r = 0; r < kTile; ++r)
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sums[r][e] = std::fma(a[r], b[e], sums[r][e]);
  }
}

// S = decay S + k^T z for up to kMostRows keys of S [keys, kColumns]; k and z have `rows` tokens.
template <int kKeyPitch, int kColumns, int kWidth>
__device__ void add_to_state(float* state, int keys, float decay, const float* k, const float* z,
                             int rows) {
  float* const of_s = state + first_row() * kColumns + first_column<kWidth>();
  float sums[kTile][kWidth];
#pragma unroll
  for (int r = 0; r < kTile; ++r)
#pragma unroll
    for (int e = 0; e < kWidth; ++e)
      sums[r][e] = first_row() + r < keys ? decay * of_s[r * kColumns + e] : 0.0f;
  add_products<kKeyPitch, kColumns>(sums, k, z, rows);
#pragma unroll
  for (int r = 0; r < kTile; ++r)
#pragma unroll
    for (int e = 0; e < kWidth; ++e)
      if (first_row() + r < keys) of_s[r * kColumns + e] = sums[r][e];
}

// Elements slab .. slab + kSlab - 1 of the rows of x, `stride` apart, transposed. What is past the
// rows or past `width` is 0.
template <class X>
__device__ void load_transposed(float (&to)[kSlab][kPitch], const X* x, std::int64_t stride,
                                int rows, int slab, int width) {
  for (int i = static_cast<int>(threadIdx.x); i < kMostRows * kSlab; i += kThreads) {
    const int row = i / kSlab, m = i % kSlab;
    to[m][row] =
        row < rows && slab + m < width ? cuda::load_math(x[row * stride + slab + m]) : 0.0f;
  }
}

// The sums of x[i] . y[j] over all keys, for rows i and j of one chunk. x may be y.
struct Slabs {
  float x[kSlab][kPitch], y[kSlab][kPitch];
};
template <class X>
__device__ void multiply_rows(float (&sums)[kTile][kTile], Slabs& s, const X* x, const X* y,
                              std::int64_t stride, int rows, int keys) {
  for (int slab = 0; slab < keys; slab += kSlab) {
    __syncthreads();
    load_transposed(s.x, x, stride, rows, slab, keys);
    if (x != y) load_transposed(s.y, y, stride, rows, slab, keys);
    __syncthreads();
    add_products<kPitch, kPitch>(sums, &s.x[0][0], x != y ? &s.y[0][0] : &s.x[0][0],
                                 min(kSlab, keys - slab));
  }
}

}  // namespace bittern::exact
