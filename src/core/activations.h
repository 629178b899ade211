// gelu in fixed operations, as core/math.h has exp: `ref` and every SIMD target
// (cpu/activations-inl.h, line by line the same) give the same bits.
//
//   gelu_tanh(x)  x / (1 + e^-u), u = 2 sqrt(2 / pi) (x + 0.044715 x^3): torch's gelu(approximate =
//                 "tanh") in another form; within 4 ulp for x >= -1, below that within 2^-24
//   gelu(x)       x P(N(0, 1) < x): within 10 ulp for x >= -13, below that (where the probability
//                 is nearly subnormal) within 2^-126
//   gelu_tanh_slope(x), gelu_slope(x)   their derivatives, within 2^-19 and 2^-21
//
// gelu and gelu_tanh are NaN at -infinity, as x * 0 is. The slopes are 0 there, and 1 at +infinity.
#pragma once
#include "core/math.h"

namespace bittern::math {

inline constexpr float kGeluTanhLinear = 0x1.988454p0f;  // 2 sqrt(2 / pi)
inline constexpr float kGeluTanhCubic = 0x1.2444f2p-4f;  // and times 0.044715

// sigmoid(u)
BITTERN_HOST_DEVICE inline float gelu_tanh_gate(float x) {
  return sigmoid(x * std::fma(x * x, kGeluTanhCubic, kGeluTanhLinear));
}
BITTERN_HOST_DEVICE inline float gelu_tanh(float x) { return x * gelu_tanh_gate(x); }

// s (1 + x u' (1 - s)) with s = sigmoid(u), which is 0 or 1 beyond kGeluTanhMost: x u' must not
// overflow there.
inline constexpr float kGeluTanhMost = 12.0f;
inline constexpr float kGeluTanhSlope = 3 * kGeluTanhCubic;
BITTERN_HOST_DEVICE inline float gelu_tanh_slope(float x, float gate) {
  float t = std::fabs(x);
  if (t > kGeluTanhMost) t = kGeluTanhMost;  // false for NaN, which goes through
  t = std::copysign(t, x);
  const float slope = t * std::fma(t * t, kGeluTanhSlope, kGeluTanhLinear);
  return gate * std::fma(slope, 1.0f - gate, 1.0f);
}

// P(N(0, 1) > t) = e^(-t^2 / 2) (c0 + c1 q + ...), q = (t - 3) / (t + 3), within 2^-22.4 for 0 <= t
// <= kGeluMost: minimax. Beyond, the result rounds to 0.
inline constexpr float kGeluMost = 14.5f;
inline constexpr float kGeluMiddle = 3.0f;
constexpr float gelu_term(int i) {
  constexpr float kTerms[] = {0x1.f1b89cp-4f,  -0x1.a6b66ap-3f, 0x1.f8bad2p-4f,   -0x1.7a943cp-5f,
                              0x1.91dcecp-8f,  0x1.7caf12p-9f,  -0x1.01c35cp-10f, -0x1.637b18p-12f,
                              0x1.e26706p-14f, 0x1.bdf488p-15f};
  return kTerms[i];
}

// t is |x|, at most kGeluMost; bell is e^(-t^2 / 2), below is P(N(0, 1) < x).
struct GeluParts {
  float t, bell, below;
};
BITTERN_HOST_DEVICE inline GeluParts gelu_parts(float x) {
  float t = std::fabs(x);
  if (t > kGeluMost) t = kGeluMost;  // false for NaN, which goes through
  const float q = (t - kGeluMiddle) / (t + kGeluMiddle);
  float p = gelu_term(9);
  for (int i = 8; i >= 0; --i) p = std::fma(p, q, gelu_term(i));
  const float half = -0.5f * t;
  const float square = half * t;
  const float lost = std::fma(half, t, -square);
  const float bell = exp(square, lost);
  const float tail = bell * p;
  return {t, bell, x < 0 ? tail : 1.0f - tail};
}
BITTERN_HOST_DEVICE inline float gelu(float x) { return x * gelu_parts(x).below; }

// P(N(0, 1) < x) + x e^(-x^2 / 2) / sqrt(2 pi)
inline constexpr float kInverseRootTwoPi = 0x1.988454p-2f;
BITTERN_HOST_DEVICE inline float gelu_slope(float x, const GeluParts& parts) {
  const float density = kInverseRootTwoPi * parts.bell;
  return std::fma(std::copysign(parts.t, x), density, parts.below);
}

}  // namespace bittern::math
