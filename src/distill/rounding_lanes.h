// The loops of rounding.h that take time. They work on kRows rows of a matrix at once: an array of
// `inputs` numbers a row is [inputs, kRows], so that a vector holds one column of several rows.
// Each row has operations of its own, which depend neither on the vector's length nor on its
// neighbours.
#pragma once
#include <cstdint>

#include "bittern/status.h"

namespace bittern::lanes {

inline constexpr std::int64_t kRows = 64;

// f32 [inputs, inputs], rows `stride` apart.
struct Square {
  const float* data;
  std::int64_t inputs, stride;
};

// w = scale * code + bias, code 0 .. top; scales and biases [inputs / group, kRows].
struct Grids {
  const float* scales;
  const float* biases;
  std::int64_t group;
  float top;
};

// code = clamp(R((w - bias) / scale), 0, top), R to the nearest, ties to even; 0 where scale is 0.
void nearest_codes(const Grids& grids, std::int64_t inputs, const float* w, float* codes);

// Hessian-compensated rounding, columns in `order`. For j ascending, with c = order[j]:
//   code[c] = the nearest of w[j];  e = (w[j] - its value) / u[j][j]
//   w[k] = fma(-e, u[k][j], w[k]) for k > j
// u is the transposed upper factor. w is in that order, and destroyed.
void compensated_codes(const Grids& grids, const Square& u, const std::int64_t* order, float* w,
                       float* codes);

// g = H e: g[i] = fma(H[i][j], e[j], ...), j ascending.
void products(const Square& h, const float* e, float* g);

// One pass of coordinate descent. For j ascending, with g = H (w - y):
//   to = clamp(R(code[j] + g[j] / (H[j][j] scale)), 0, top);  d = (to - code[j]) scale
//   g[k] = fma(-d, H[k][j], g[k]) for k > j
// g is destroyed.
void descend(const Grids& grids, const Square& h, float* g, float* codes);

// The normal equations of a step of all scales and biases, unknown 2g the scale of group g and
// 2g + 1 its bias: the lower triangle [2 groups (2 groups + 1) / 2, kRows], row by row, for the
// given codes. sums [inputs, groups] are those of H's rows over each group of columns, totals
// [groups, groups] those of `sums` over groups of rows. `room` has [inputs, kRows].
void normal_equations(const Square& h, std::int64_t group, const float* sums, const float* totals,
                      const float* codes, float* room, float* system);

// Solves such a system, which is destroyed; x [unknowns, kRows] is the right side and becomes the
// solution. `ridge` of the diagonal is added to it.
void solve(std::int64_t unknowns, float ridge, float* system, float* x);

// Whether this CPU can run them.
Status supported();

}  // namespace bittern::lanes
