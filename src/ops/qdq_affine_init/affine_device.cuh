// What the kernels of qdq_affine_init share: the problem, parameters in their dtype, and the way of
// codes from registers to memory.
#pragma once
#include <cmath>
#include <limits>

#include "bittern/ops/qdq_affine_init.h"
#include "cuda/codes.cuh"
#include "cuda/device.cuh"
#include "cuda/tree.cuh"
#include "ops/qdq_affine_init/affine_rules.h"

namespace bittern::affine {

struct Problem {
  const void* w;
  const float* importance;  // may be null
  void *scales, *biases, *q;
  DType scale_element;
  AffineMethod method;
  std::int64_t w_stride, q_stride, groups;
  cuda::Divisor row_groups;
  bool one_row;  // or rows that follow each other as one
  bool packed;
  bool wide_codes;  // codes one per byte, or of 8 bits, may be written 8 at a time
  int group_size, bits, bins;
};

// x rounded to the dtype of scales and biases.
struct Stored {
  DType dtype;
  __device__ float operator()(float x) const {
    if (dtype == DType::f16) return cuda::load_math(cuda::store_math<f16>(x));
    if (dtype == DType::bf16) return cuda::load_math(cuda::store_math<bf16>(x));
    return x;
  }
  __device__ double operator()(double x) const { return x; }
};

template <class F>
__device__ F largest_stored(DType dtype) {
  if constexpr (sizeof(F) == 4) {
    if (dtype == DType::f16) return max_finite<f16>();
    if (dtype == DType::bf16) return max_finite<bf16>();
  }
  return max_finite<F>();
}

template <class F>
__device__ void store_param(void* params, DType dtype, std::int64_t at, F x) {
  if constexpr (sizeof(F) == 8) {
    static_cast<double*>(params)[at] = x;
  } else if (dtype == DType::f32) {
    static_cast<float*>(params)[at] = x;
  } else if (dtype == DType::f16) {
    static_cast<f16*>(params)[at] = cuda::store_math<f16>(x);
  } else {
    static_cast<bf16*>(params)[at] = cuda::store_math<bf16>(x);
  }
}

template <class F>
__device__ void extend(Range<F>& r, F x) {
  if (!std::isfinite(x)) return;
  r.min = std::min(r.min, x);
  r.max = std::max(r.max, x);
}

// The range over the lanes of teams of kLanes.
template <int kLanes, class F>
__device__ Range<F> team_range(Range<F> r) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    r.min = fmin(r.min, __shfl_xor_sync(cuda::kWarp, r.min, distance));
    r.max = fmax(r.max, __shfl_xor_sync(cuda::kWarp, r.max, distance));
  }
  return r;
}

// ---- codes without a division ----

// Weights and biases below kOrdinary, and scales between 2^-90 and 2^90, are far from overflow and
// underflow: there x / s is the IEEE quotient in five operations from inverse = 1 / s. The first
// correction brings z within one ulp; then the remainder is exact, and by Markstein's theorem the
// second correction rounds correctly. A quotient too small for that is far below 1/2.
constexpr float kOrdinary = 0x1p30f;

__device__ inline bool is_ordinary(Params<float> p) {
  const float size = fabsf(p.s);
  return fabsf(p.b) < kOrdinary && size > 0x1p-90f && size < 0x1p90f;
}

__device__ inline float divide_by(float s, float inverse, float x) {
  float z = x * inverse;
  z = fmaf(fmaf(-z, s, x), inverse, z);
  return fmaf(fmaf(-z, s, x), inverse, z);
}

// A float whose low byte is clamp(A(z), 0, n), or clamp(R(z), 0, n) for kHalfEven; 0 for NaN. For
// 0 <= z < 2^22 adding the f32 below 1/2 reaches the next integer just when the fraction is at
// least 1/2, and adding 2^23 leaves the integer in the low bits.
template <bool kHalfEven>
__device__ std::uint32_t rounded_code(float z, float n) {
  z = fminf(fmaxf(z, 0.0f), n);
  return __float_as_uint(kHalfEven ? z + 0x1p23f : __fadd_rz(z + 0x1.fffffep-2f, 0x1p23f));
}

// The low bytes of four registers.
__device__ inline std::uint32_t four_bytes(std::uint32_t a, std::uint32_t b, std::uint32_t c,
                                           std::uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

// ---- 8 neighbouring codes of a lane ----

// Four codes in bytes, closed up to `bits` bits each.
__device__ inline std::uint32_t close_up(std::uint32_t bytes, int bits) {
  const std::uint32_t pairs = (bytes & 0x00ff00ffu) + ((bytes >> 8 & 0x00ff00ffu) << bits);
  return (pairs & 0xffffu) + (pairs >> 16 << 2 * bits);
}

// Writes codes 8 chunk .. 8 chunk + 7 of a row whose codes begin at `row`, given as bytes in `low`
// and `high`. Packed, 8 codes are `bits` bytes and a quad of lanes, with neighbouring chunks from a
// multiple of 4 on, has `bits` whole words: a width that is not a store's is put together there.
// Whole warps call this; lanes that are not to `store` still take part.
__device__ inline void write_codes(const Problem& p, std::uint8_t* row, std::int64_t chunk,
                                   std::uint32_t low, std::uint32_t high, bool store) {
  const int bits = p.packed ? p.bits : 8;
  if (bits == 8) {
    auto* to = reinterpret_cast<std::uint32_t*>(row + 8 * chunk);
    if (store && p.wide_codes) __stcs(reinterpret_cast<uint2*>(to), make_uint2(low, high));
    if (store && !p.wide_codes) {
      to[0] = low;
      to[1] = high;
    }
    return;
  }
  const std::uint64_t stream = close_up(low, bits) | std::uint64_t{close_up(high, bits)}
                                                         << 4 * bits;
  std::uint8_t* to = row + bits * chunk;
  if (bits == 4) {
    if (store) __stcs(reinterpret_cast<unsigned*>(to), static_cast<unsigned>(stream));
  } else if (bits == 2) {
    if (store) *reinterpret_cast<std::uint16_t*>(to) = static_cast<std::uint16_t>(stream);
  } else if (bits == 1) {
    if (store) *to = static_cast<std::uint8_t>(stream);
  } else {
    const int lane = static_cast<int>(threadIdx.x % 32), quad = lane % 4;
    auto* words = reinterpret_cast<std::uint32_t*>(row + bits * (chunk - quad));
    std::uint32_t word[2] = {0, 0};  // words quad and quad + 4 of the quad
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::uint64_t part =
          __shfl_sync(cuda::kWarp, static_cast<unsigned long long>(stream), lane - quad + i);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int shift = 8 * bits * i - 32 * (quad + 4 * k);
        if (shift >= 0 && shift < 32) word[k] |= static_cast<std::uint32_t>(part << shift);
        if (shift < 0 && shift > -64) word[k] |= static_cast<std::uint32_t>(part >> -shift);
      }
    }
    if (store && quad < bits) words[quad] = word[0];
    if (store && quad + 4 < bits) words[quad + 4] = word[1];
  }
}

// ---- lsq ----

// The least-squares s and b of a group's sums, as stored; s is NaN where there are none.
template <class F>
__device__ Params<F> fit(double c, double cq, double cqq, double cu, double cqu, F b0,
                         const Stored& stored) {
  const double r = 1 / (c * cqq - cq * cq);
  const double s = (c * cqu - cq * cu) * r;
  const double b = static_cast<double>(b0) + (cqq * cu - cq * cqu) * r;
  const Params<F> p{stored(static_cast<F>(s)), stored(static_cast<F>(b)) + F(0)};
  if (p.s > 0 && std::isfinite(p.s) && std::isfinite(p.b)) return p;
  return {std::numeric_limits<F>::quiet_NaN(), 0};
}

constexpr int kMostFits = 20;

// Is the fit kept?
__device__ inline bool gains(double before, double after) {
  return before >= 0x1p-800 && std::isfinite(before) && after < before * (1 - 0x1p-20);
}

}  // namespace bittern::affine
