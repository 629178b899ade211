// What ref and the SIMD kernels of gguf_quantize share: the constants of the rules (the header and
// docs/numerics.md give these), and the scalar steps that are not worth vectors.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "bittern/gguf_desc.h"
#include "core/blocks.h"

namespace bittern::blocks {

inline float rounded_to_half(float x) {
  return to_f32(to_f16(std::clamp(x, -kLargestHalf, kLargestHalf)));
}

inline void put_f16(std::uint8_t* at, float x) {
  const f16 half = to_f16(x);
  std::memcpy(at, &half, sizeof half);
}

// ---- Q2_K, Q3_K, Q4_K, Q5_K, Q6_K ----

inline constexpr float kTiny = 0x1p-100f;          // a range or a scale below it is none
inline constexpr float kMostImportance = 0x1p40f;  // so that no sum overflows
inline constexpr float kDegenerate = 0x1p-10f;     // codes that vary less determine no line

// Importance as the rules see it.
inline float weight_of(float importance) {
  return importance > 0 && std::isfinite(importance) ? std::min(importance, kMostImportance) : 0;
}

// What is tried for a group's scale beside the nearest multiple: the first of equals is kept.
inline constexpr float kMoves[] = {0, -1, 1};

// How the values of a super-block's groups are rounded to multiples of one step.
struct StepRule {
  float top, toward;  // the largest value is `top` steps, or some less towards 0
  float low, high;    // of a multiple
};
inline constexpr int kStepTries = 16;

// A type: its groups, its codes and how a group is searched. Types with codes below 0 have a scale
// of either sign and no minimum.
struct SuperRule {
  int group, groups;   // weights in a group, groups in a super-block
  float low, high;     // of a code
  float first, apart;  // a group's range (its largest weight) is first + apart k steps wide
  int fits;            // lines in turn, each to the codes of the one before
  int ends;            // 2: the largest weight is tried at either end of the codes
  StepRule steps;

  float steps_of_start(int k) const { return first + apart * static_cast<float>(k); }
};
inline constexpr int kStarts = 16;
inline constexpr int kMostGroups = 16;

constexpr SuperRule super_rule(BlockType type) {
  switch (type) {
    case BlockType::q2_k: return {16, 16, 0, 3, 2, 0.15f, 2, 1, {15, -0.5f, 0, 15}};
    case BlockType::q3_k: return {16, 16, -4, 3, 2, 0.2f, 1, 2, {-32, 1, -32, 31}};
    case BlockType::q4_k: return {32, 8, 0, 15, 13, 0.2f, 1, 1, {63, -1, 0, 63}};
    case BlockType::q5_k: return {32, 8, 0, 31, 29, 0.2f, 1, 1, {63, -1, 0, 63}};
    default: return {16, 16, -32, 31, 30, 0.2f, 1, 1, {-128, 1, -128, 127}};  // Q6_K
  }
}

// A group's grid, w = s q - m.
struct Grid {
  float s, m;
};

// One that is given as w = s q + b, made what a block can hold.
inline Grid given_grid(float s, float b, float n) {
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
  constexpr float kMost = largest_weight(BlockType::q4_k);  // Q5_K's too
  return {s < kTiny ? 0 : std::min(s, kMost), std::min(-b, kMost)};
}

// Weighted sums over a group for its codes q.
struct Sums {
  float one, x, q, qq, qx;
};

// Least squares for d and dmin of w = (d sc) q - dmin mn over a super-block; both stay where the
// codes do not determine them.
inline void refit(const Sums* sums, const float* sc, const float* mn, int groups, float& d,
                  float& dmin) {
  double aa = 0, ab = 0, bb = 0, xa = 0, xb = 0;
  for (int g = 0; g < groups; ++g) {
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
inline void refit_signed(const Sums* sums, const float* sc, int groups, float& d) {
  double aa = 0, xa = 0;
  for (int g = 0; g < groups; ++g) {
    const double a = sc[g];
    aa += a * a * sums[g].qq;
    xa += a * sums[g].qx;
  }
  if (aa > 0) d = rounded_to_half(static_cast<float>(xa / aa));
}

// sc and mn as a type packs them, and d and dmin: all of a block but its codes. Into zeros.
inline void put_scales(BlockType type, const float* sc, const float* mn, float d, float dmin,
                       std::uint8_t* block) {
  const auto put = [&](int at, int bits) {
    block[at] = static_cast<std::uint8_t>(block[at] | bits);
  };
  const auto s = [&](int g) { return static_cast<int>(sc[g]); };
  const auto m = [&](int g) { return static_cast<int>(mn[g]); };
  switch (type) {
    case BlockType::q2_k:
      for (int g = 0; g < 16; ++g) put(g, s(g) | m(g) << 4);
      put_f16(block + 80, d);
      put_f16(block + 82, dmin);
      break;
    case BlockType::q3_k:
      for (int g = 0; g < 16; ++g) {
        put(96 + g % 8, ((s(g) + 32) & 15) << g / 8 * 4);
        put(104 + g % 4, (s(g) + 32) >> 4 << g / 4 * 2);
      }
      put_f16(block + 108, d);
      break;
    case BlockType::q4_k:
    case BlockType::q5_k:
      put_f16(block, d);
      put_f16(block + 2, dmin);
      for (int g = 0; g < 4; ++g) {
        put(4 + g, s(g) | s(g + 4) >> 4 << 6);
        put(8 + g, m(g) | m(g + 4) >> 4 << 6);
        put(12 + g, (s(g + 4) & 15) | (m(g + 4) & 15) << 4);
      }
      break;
    default:  // Q6_K
      for (int g = 0; g < 16; ++g) put(192 + g, s(g) & 255);
      put_f16(block + 208, d);
  }
}

}  // namespace bittern::blocks
