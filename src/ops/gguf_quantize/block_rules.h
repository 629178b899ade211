// What ref and the SIMD kernels of gguf_quantize share: the constants of the rules (the header and
// docs/numerics.md give these), and the scalar steps that are not worth vectors.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "bittern/gguf_desc.h"

namespace bittern::blocks {

inline constexpr float kLargestHalf = 65504;

// The largest magnitude of a weight.
constexpr float limit(BlockType type) {
  switch (type) {
    case BlockType::q4_0: return 8 * kLargestHalf;
    case BlockType::q5_0: return 16 * kLargestHalf;
    case BlockType::q8_0: return 127 * kLargestHalf;
    case BlockType::q4_k:
    case BlockType::q5_k: return 63 * kLargestHalf;
    case BlockType::q6_k: return 2048 * kLargestHalf;
    default: return kLargestHalf;
  }
}

inline float rounded_to_half(float x) {
  return to_f32(to_f16(std::clamp(x, -kLargestHalf, kLargestHalf)));
}

inline void put_f16(std::uint8_t* at, float x) {
  const f16 half = to_f16(x);
  std::memcpy(at, &half, sizeof half);
}

// ---- Q4_K, Q5_K, Q6_K ----

inline constexpr float kTiny = 0x1p-100f;          // a range below it is none
inline constexpr float kMostImportance = 0x1p40f;  // so that no sum overflows
inline constexpr float kDegenerate = 0x1p-10f;     // codes that vary less determine no line

// Importance as the rules see it.
inline float weight_of(float importance) {
  return importance > 0 && std::isfinite(importance) ? std::min(importance, kMostImportance) : 0;
}

// What is tried for a group's scale beside the nearest multiple: the first of equals is kept.
inline constexpr float kMoves[] = {0, -1, 1};

// Steps that the search cuts a group's range into: last - 2, last - 1.8, ... last + 1.
inline constexpr int kStarts = 16;
constexpr float steps_of_start(int last, int k) {
  return static_cast<float>(last - 2) + 0.2f * static_cast<float>(k);
}
// Of Q6_K, on the side of the largest magnitude: 30, 30.2, ... 33.
constexpr float signed_steps_of_start(int k) { return 30.0f + 0.2f * static_cast<float>(k); }

// How the values of a super-block's groups are rounded to multiples of one step.
struct StepRule {
  float top, toward;  // the largest value is `top` steps, or a few less towards 0
  float low, high;    // of a multiple
  int groups;
};
inline constexpr int kStepTries = 16;
inline constexpr StepRule kUnsignedSteps{63, -1, 0, 63, 8};
inline constexpr StepRule kSignedSteps{-128, 1, -128, 127, 16};

// A group's grid, w = s q - m.
struct Grid {
  float s, m;
};

// One that is given as w = s q + b, made what a block can hold.
inline Grid given_grid(float s, float b, int last) {
  const auto n = static_cast<float>(last);
  if (!std::isfinite(s)) s = 0;
  if (!std::isfinite(b)) b = 0;
  if (s < 0) {  // the same values, counted from the other end
    b += n * s;
    s = -s;
  }
  if (b > 0) {  // from 0 to the same top
    s += b / n;
    b = 0;
  }
  constexpr float kMost = limit(BlockType::q4_k);
  return {s < kTiny ? 0 : std::min(s, kMost), std::min(-b, kMost)};
}

// Weighted sums over a group for its codes q.
struct Sums {
  float one, x, q, qq, qx;
};

// Least squares for d and dmin of w = (d sc) q - dmin mn over a super-block; both stay where the
// codes do not determine them.
inline void refit(const Sums sums[8], const float sc[8], const float mn[8], float& d, float& dmin) {
  double aa = 0, ab = 0, bb = 0, xa = 0, xb = 0;
  for (int g = 0; g < 8; ++g) {
    const double a = sc[g], b = mn[g];
    aa += a * a * sums[g].qq;
    ab += a * b * sums[g].q;
    bb += b * b * sums[g].one;
    xa += a * sums[g].qx;
    xb += b * sums[g].x;
  }
  if (bb == 0) {
    if (aa > 0 && xa > 0) d = rounded_to_half(static_cast<float>(xa / aa));
    return;
  }
  const double det = aa * bb - ab * ab;
  if (!(det > 1e-6 * (aa * bb))) return;
  const double step = (xa * bb - ab * xb) / det, min_step = (ab * xa - aa * xb) / det;
  if (!(step > 0) || !(min_step > 0)) return;
  d = rounded_to_half(static_cast<float>(step));
  dmin = rounded_to_half(static_cast<float>(min_step));
}

// The same for d of w = (d sc) q.
inline void refit_signed(const Sums sums[16], const float sc[16], float& d) {
  double aa = 0, xa = 0;
  for (int g = 0; g < 16; ++g) {
    const double a = sc[g];
    aa += a * a * sums[g].qq;
    xa += a * sums[g].qx;
  }
  if (aa > 0) d = rounded_to_half(static_cast<float>(xa / aa));
}

// The six bits of sc and mn, as Q4_K and Q5_K pack them.
inline void put_scales(const float sc[8], const float mn[8], std::uint8_t scales[12]) {
  for (int g = 0; g < 4; ++g) {
    const int s = static_cast<int>(sc[g]), m = static_cast<int>(mn[g]);
    const int t = static_cast<int>(sc[g + 4]), o = static_cast<int>(mn[g + 4]);
    scales[g] = static_cast<std::uint8_t>(s | (t >> 4) << 6);
    scales[g + 4] = static_cast<std::uint8_t>(m | (o >> 4) << 6);
    scales[g + 8] = static_cast<std::uint8_t>((t & 15) | (o & 15) << 4);
  }
}

}  // namespace bittern::blocks
