// sigmoid, softplus and silu with core/math.h's bits, in fewer instructions.
#pragma once
#include "core/math.h"
#include "cuda/device.cuh"
#include "cuda/ptx.cuh"

namespace bittern::cuda {

// e^-|x| in two parts, math::exp_parts line by line, but for what needs no saying below 1; of NaN
// the parts of 0.
struct MinusExp {
  float high, low;
};
__device__ inline MinusExp exp_of_minus(float x) {
  const float least = fmaxf(-fabsf(x), math::kExpLeast);
  const float shifted = fmaf(least, math::kLog2E, math::kRounder);
  const float n = shifted - math::kRounder;
  float r = fmaf(n, -math::kLn2High, least);
  r = fmaf(n, -math::kLn2Low, r);
  float q = fmaf(math::exp_term(4), r, math::exp_term(3));
  q = fmaf(q, r, math::exp_term(2));
  q = fmaf(q, r, math::exp_term(1));
  q = fmaf(q, r, math::exp_term(0));
  const float line = 1.0f + r;
  const float tail = fmaf(r * r, q, r - (line - 1.0f));
  const float high = line + tail;
  const float low = tail - (high - line);
  // Times 2^n, n in [-150, 0], as 2^(n + 64) and 2^-64: as there, only the last product can round.
  const float scale =
      __uint_as_float((__float_as_uint(shifted) << 23) + (unsigned{127 + 64} << 23));
  return {high * scale * 0x1p-64f, low * scale * 0x1p-64f};
}

// math::sigmoid, but for NaN, which gives 1: whoever multiplies by x gets it back.
__device__ inline float sigmoid(float x) {
  const auto [e, e_low] = exp_of_minus(x);
  const float d = 1.0f + e;
  const float d_low = ((1.0f - d) + e) + e_low;
  // 1 / d for d in [1, 2]: one step of Newton's rounds it as division does, for all 2^23 of them.
  const float near = approximate_reciprocal(d);
  const float inverse = fmaf(near, fmaf(-d, near, 1.0f), near);
  const float quotient = (x < 0 ? e : 1.0f) * inverse;
  float rest = fmaf(-quotient, d, x < 0 ? e : 1.0f);
  rest = fmaf(-quotient, d_low, rest);
  if (x < 0) rest = rest + e_low;
  return fmaf(rest, inverse, quotient);
}

// math::softplus.
__device__ inline float softplus(float x) {
  const float square = x * x;
  float q = math::softplus_near_term(4);
#pragma unroll
  for (int i = 3; i >= 0; --i) q = fmaf(q, square, math::softplus_near_term(i));
  const float line = fmaf(0.5f, x, math::kLn2);
  const float lost = fmaf(0.5f, x, math::kLn2 - line) + math::kLn2Rest;
  const float near = line + fmaf(square, q, lost);
  const auto [e, e_low] = exp_of_minus(x);
  float p = math::softplus_far_term(6);
#pragma unroll
  for (int i = 5; i >= 0; --i) p = fmaf(p, e, math::softplus_far_term(i));
  const float log1p_e = e + fmaf(e * e, p, fmaf(-e, e_low, e_low));
  const float far = fmaxf(x, 0.0f) + log1p_e;
  const float y = fabsf(x) >= 1 ? far : near;  // a NaN is near here, where it stays one
  return x > math::kSoftplusLinear ? x : y;
}

// a[i] for an index known only at run time, of registers.
template <int N>
__device__ inline float pick(const float (&a)[N], int i) {
  float v = a[0];
#pragma unroll
  for (int k = 1; k < N; ++k) v = i == k ? a[k] : v;
  return v;
}

// y[i] = silu(z[i]), or with kTimes y[i] * silu(z[i]). What is to be stored as f32 or f16 has
// math::silu's bits. What is to be stored as bf16 has bits that round alike: an estimate of silu is
// enough unless y lies near a tie.
//
// In units of 2^-24 of y, and for z >= -16: the argument of exp2 is wrong by 15, exp2 by 4, the sum
// and its reciprocal by 3, the two products by 2; the contract's value by 2.2 ulp and one product.
// An ulp is at least one unit, so that y and the contract's value are at most 29 ulp apart.
template <class X, bool kTimes, int N>
__device__ inline void with_silu(const float (&z)[N], float (&y)[N]) {
  const auto exact = [](float gate, float factor) {
    const float silu = gate * sigmoid(gate);
    return kTimes ? factor * silu : silu;
  };
  if constexpr (!std::is_same_v<X, bf16>) {
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] = exact(z[i], y[i]);
  } else {
    constexpr float kLeast = -16;
    constexpr unsigned kApart = 32;
    // The bits that bf16 drops, as a distance above the lowest value near a tie.
    const auto past_tie = [](float v) {
      return (__float_as_uint(v) << 16) - ((0x8000u - kApart) << 16);
    };
    constexpr unsigned kSure = 2 * kApart << 16;
    float factor[N], least = z[0];
    unsigned nearest = ~0u;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      factor[i] = y[i];
      const float silu =
          z[i] * approximate_reciprocal(1.0f + approximate_exp2(z[i] * -math::kLog2E));
      y[i] = kTimes ? factor[i] * silu : silu;
      least = fminf(least, z[i]);
      nearest = min(nearest, past_tie(y[i]));
    }
    if (least >= kLeast && nearest >= kSure) return;
    // Seldom: a loop, to be short.
#pragma unroll 1
    for (int i = 0; i < N; ++i) {
      const float gate = pick(z, i);
      if (gate >= kLeast && past_tie(pick(y, i)) >= kSure) continue;
      const float value = exact(gate, pick(factor, i));
#pragma unroll
      for (int k = 0; k < N; ++k) y[k] = i == k ? value : y[k];
    }
  }
}

}  // namespace bittern::cuda
