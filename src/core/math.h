// exp and what is made of it, in fixed operations: each line below is one IEEE operation (or one
// fma) in f32 or f64, so `ref`, every SIMD target (cpu/math-inl.h, line by line the same) and every
// other backend give the same bits, which no libm promises.
//
//   exp(x)         within 1 ulp, also for subnormal results; 0 and infinity beyond; NaN gives NaN
//   exp(x, low)    e^(x + low), the sum not rounded: within 1 ulp, only for |low| <= 1/8
//   exp64(x)       in f64: within 2^-52 of itself; 0 below -708, e^709 above 709; NaN gives NaN
//   sigmoid(x)     within 1 ulp, also for subnormal results; 0 at -infinity, 1 at +infinity
//   silu(x)        x * sigmoid(x): within 2.2 ulp down to x = -87, below that (where sigmoid(x) is
//                  subnormal) within 2^-142; NaN at -infinity
//   silu_slope(x)  its derivative, s * fma(x, 1 - s, 1) with s = sigmoid(x): within 2^-20
//   softplus(x)    x > 20 ? x : log1p(e^x), within 1 ulp
//   tanh(x)        within 1.4 ulp
//
// The derivative of sigmoid is s * (1 - s), that of softplus x > 20 ? 1 : sigmoid(x).
// Round-to-nearest is assumed throughout, as everywhere else.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

#include "core/host_device.h"

namespace bittern::math {

// The constants are shared with the SIMD form.
inline constexpr float kLog2E = 0x1.715476p0f;
inline constexpr float kLn2High = 0x1.62e4p-1f;  // 15 bits: products with |n| < 512 are exact
inline constexpr float kLn2Low = 0x1.7f7d1cp-20f;
// Adding it leaves the nearest integer in the low bits; it is exact, ties to even, up to 2^22.
inline constexpr float kRounder = 0x1.8p23f;
// e^x is infinite above the first, and rounds to 0 below the second.
inline constexpr float kExpMost = 89.0f;
inline constexpr float kExpLeast = -104.0f;
inline constexpr float kExpLeastHigh = -105.0f;  // the same with a low part of up to 1/8
// e^r = 1 + r + r^2 (c0 + c1 r + ...) within 2^-28.2 for |r| <= ln(2)/2: minimax, each coefficient
// rounded to f32 before the next was computed.
// (Tables are functions: device code has no access to the host's arrays.)
constexpr float exp_term(int i) {
  constexpr float kTerms[] = {0x1.fffffcp-2f, 0x1.55548ap-3f, 0x1.55584ep-5f, 0x1.123f3p-7f,
                              0x1.6ad158p-10f};
  return kTerms[i];
}

// e^x = (high + low) * two_n0 * two_n1, each power of two finite; low is what rounding to high
// lost.
struct ExpParts {
  float high, low, two_n0, two_n1;
};

BITTERN_HOST_DEVICE inline float power_of_two(std::int32_t n) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(n + 127) << 23);
}

// e^r 2^n; the low bits of `shifted` hold n.
BITTERN_HOST_DEVICE inline ExpParts exp_parts(float shifted, float r) {
  float q = std::fma(exp_term(4), r, exp_term(3));
  q = std::fma(q, r, exp_term(2));
  q = std::fma(q, r, exp_term(1));
  q = std::fma(q, r, exp_term(0));
  const float line = 1.0f + r;
  const float tail = std::fma(r * r, q, r - (line - 1.0f));
  const float high = line + tail;
  const float low = tail - (high - line);
  // For a NaN `shifted` may hold any value, and NaN times a power of two is NaN.
  const auto whole = static_cast<std::int32_t>(std::bit_cast<std::uint32_t>(shifted) -
                                               std::bit_cast<std::uint32_t>(kRounder));
  const std::int32_t half = whole >> 1;
  return {high, low, power_of_two(half), power_of_two(whole - half)};
}
BITTERN_HOST_DEVICE inline ExpParts exp_parts(float x) {
  if (x > kExpMost) x = kExpMost;  // false for NaN, which goes through
  if (x < kExpLeast) x = kExpLeast;
  const float shifted = std::fma(x, kLog2E, kRounder);
  const float n = shifted - kRounder;
  float r = std::fma(n, -kLn2High, x);
  r = std::fma(n, -kLn2Low, r);
  return exp_parts(shifted, r);
}

BITTERN_HOST_DEVICE inline float exp(float x) {
  const ExpParts e = exp_parts(x);
  return e.high * e.two_n0 * e.two_n1;
}
BITTERN_HOST_DEVICE inline float exp(float x, float low) {
  if (x > kExpMost) x = kExpMost;
  if (x < kExpLeastHigh) x = kExpLeastHigh;
  const float shifted = std::fma(x + low, kLog2E, kRounder);
  const float n = shifted - kRounder;
  const float tail = std::fma(n, -kLn2Low, low);
  const float r = std::fma(n, -kLn2High, x) + tail;
  const ExpParts e = exp_parts(shifted, r);
  return e.high * e.two_n0 * e.two_n1;
}

BITTERN_HOST_DEVICE inline float sigmoid(float x) {
  // With e = e^-|x| in two parts: e / (1 + e) where x is negative, else 1 / (1 + e); the quotient
  // is corrected by the remainder that high parts leave.
  const ExpParts parts = exp_parts(-std::fabs(x));
  const float e = parts.high * parts.two_n0 * parts.two_n1;
  const float e_low = parts.low * parts.two_n0 * parts.two_n1;
  const float d = 1.0f + e;
  const float d_low = ((1.0f - d) + e) + e_low;
  const float inverse = 1.0f / d;
  const float a = x < 0 ? e : 1.0f;
  const float a_low = x < 0 ? e_low : 0.0f;
  const float quotient = a * inverse;
  float rest = std::fma(-quotient, d, a);
  rest = std::fma(-quotient, d_low, rest);
  rest = rest + a_low;
  return std::fma(rest, inverse, quotient);
}

BITTERN_HOST_DEVICE inline float silu(float x) { return x * sigmoid(x); }

BITTERN_HOST_DEVICE inline float silu_slope(float x, float sigmoid_of_x) {
  return sigmoid_of_x * std::fma(x, 1.0f - sigmoid_of_x, 1.0f);
}
BITTERN_HOST_DEVICE inline float silu_slope(float x) { return silu_slope(x, sigmoid(x)); }

// tanh x = x + x^3 (c0 + c1 x^2 + ...) below kTanhSmall (the coefficients of Cephes' tanhf), and
// 1 - 2 / (e^2x + 1) above, where e^2x may be infinite.
inline constexpr float kTanhSmall = 0.625f;
constexpr float tanh_term(int i) {
  constexpr float kTerms[] = {-3.33332819422e-1f, 1.33314422036e-1f, -5.37397155531e-2f,
                              2.06390887954e-2f, -5.70498872745e-3f};
  return kTerms[i];
}

BITTERN_HOST_DEVICE inline float tanh(float x) {
  const float a = std::fabs(x);
  const float square = a * a;
  float p = std::fma(tanh_term(4), square, tanh_term(3));
  p = std::fma(p, square, tanh_term(2));
  p = std::fma(p, square, tanh_term(1));
  p = std::fma(p, square, tanh_term(0));
  const float near = std::fma(a * square, p, a);
  const float e = exp(a + a);
  const float far = 1.0f - 2.0f / (e + 1.0f);
  return std::copysign(a < kTanhSmall ? near : far, x);  // a NaN is far
}

// ---- softplus ----
//
//   ln 2 + x / 2 + x^2 (c0 + c1 x^2 + ...) below 1, being x / 2 and an even function;
//   max(x, 0) + log1p(e), e = e^-|x|, from there on, with log1p(e) = e + e^2 (d0 + d1 e + ...)
//
// both within 2^-31: minimax, each coefficient rounded to f32 before the next was computed.

inline constexpr float kSoftplusLinear = 20.0f;
inline constexpr float kLn2 = 0x1.62e43p-1f, kLn2Rest = -0x1.05c61p-29f;
constexpr float softplus_near_term(int i) {
  constexpr float kTerms[] = {0x1.fffffep-4f, -0x1.5553dcp-8f, 0x1.6bb98ap-12f, -0x1.afc9b6p-16f,
                              0x1.b33c8p-20f};
  return kTerms[i];
}
constexpr float softplus_far_term(int i) {
  constexpr float kTerms[] = {-0x1.fffffap-2f, 0x1.5553b2p-2f, -0x1.ffb1cep-3f, 0x1.961690p-3f,
                              -0x1.3f21bcp-3f, 0x1.a6394ap-4f, -0x1.4001p-5f};
  return kTerms[i];
}

BITTERN_HOST_DEVICE inline float softplus(float x) {
  const float square = x * x;
  float q = softplus_near_term(4);
  for (int i = 3; i >= 0; --i) q = std::fma(q, square, softplus_near_term(i));
  const float line = std::fma(0.5f, x, kLn2);
  const float lost = std::fma(0.5f, x, kLn2 - line) + kLn2Rest;
  const float near = line + std::fma(square, q, lost);
  const ExpParts parts = exp_parts(-std::fabs(x));
  const float e = parts.high * parts.two_n0 * parts.two_n1;
  const float e_low = parts.low * parts.two_n0 * parts.two_n1;
  float p = softplus_far_term(6);
  for (int i = 5; i >= 0; --i) p = std::fma(p, e, softplus_far_term(i));
  const float log1p_e = e + std::fma(e * e, p, std::fma(-e, e_low, e_low));
  const float far = (x > 0 ? x : 0.0f) + log1p_e;
  const float y = std::fabs(x) < 1 ? near : far;  // a NaN is far
  return x > kSoftplusLinear ? x : y;
}

// ---- exp in f64, where f32 would show in a sum ----

inline constexpr double kLog2E64 = 0x1.71547652b82fep0;
inline constexpr double kLn264 = 0x1.62e42fefa39efp-1;
inline constexpr double kRounder64 = 0x1.8p52;
// 1/k!, Taylor's coefficients.
constexpr double exp_term64(int i) {
  constexpr double kTerms[] = {1.0,
                               1.0,
                               1.0 / 2,
                               1.0 / 6,
                               1.0 / 24,
                               1.0 / 120,
                               1.0 / 720,
                               1.0 / 5040,
                               1.0 / 40320,
                               1.0 / 362880,
                               1.0 / 3628800,
                               1.0 / 39916800,
                               1.0 / 479001600,
                               1.0 / 6227020800};
  return kTerms[i];
}
inline constexpr double kExpMost64 = 709.0;
inline constexpr double kExpLeast64 = -708.0;
inline constexpr double kLn264Low = 0x1.abc9e3b39803fp-56;  // ln 2 - kLn264

BITTERN_HOST_DEVICE inline double exp64(double x) {
  double t = x;
  if (t > kExpMost64) t = kExpMost64;  // false for NaN, which goes through
  if (t < kExpLeast64) t = kExpLeast64;
  const double shifted = std::fma(t, kLog2E64, kRounder64);
  const double n = shifted - kRounder64;
  double r = std::fma(n, -kLn264, t);
  r = std::fma(n, -kLn264Low, r);
  double p = exp_term64(13);
  for (int i = 12; i >= 0; --i) p = std::fma(p, r, exp_term64(i));
  const std::uint64_t whole =
      std::bit_cast<std::uint64_t>(shifted) - std::bit_cast<std::uint64_t>(kRounder64);
  const double e = p * std::bit_cast<double>((whole + 1023) << 52);
  return x < kExpLeast64 ? 0.0 : e;
}

}  // namespace bittern::math
