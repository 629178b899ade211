// Grids with integer zero points: w = scale * (code - zero), the zero point a code 0 .. n itself,
// n = 2^bits - 1. So 0 is on every grid, and w keeps its sign.
//
// minmax  low = min(w, 0) and high = max(w, 0) of the group; scale = (high - low) / n, rounded, and
//         1 when that is not > 0; zero = R(-low / scale), at most n
// lsq     At most 10 times, until the scale no longer changes: codes, then the scale by least
//         squares for these codes and the zero point (weighted by `importance`). It starts from
//         minmax's grid, up to 5 bits also from 0.85, 0.7 and 0.55 of its scale; and from the scale
//         that lsq finds with real biases, with the four integers around that grid's -bias / scale.
//         The grid with the least sum of importance * (w - scale * (code - zero))^2 counts;
//         minmax's stays unless one is less.
//
// With a zero point that is given, scales have either sign, and both methods find the scale alone.
// Both begin with the scale that puts the number of largest magnitude at the end of the codes that
// is further from the zero point; lsq also with the one that puts it at the other end, and up to 5
// bits with the same parts of both.
//
// code = clamp(R(w / scale) + zero, 0, n), R half to even. Scales are rounded to their dtype; in
// f32 they keep 24 - bits significant bits. So scale * zero and scale * (code - zero) are exact in
// f32.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "bittern/affine_desc.h"
#include "bittern/dtype.h"
#include "bittern/status.h"
#include "formats/grid.h"

namespace bittern {

struct ZeroPointFit {
  int bits = 4, group = 64;
  DType params = DType::f32;                // of the scales: f32, f16 or bf16
  AffineMethod method = AffineMethod::lsq;  // or minmax
  std::optional<int> zero{};                // of every group, in place of one that is found
};

// Codes, scales and exact biases of w [rows, columns]: finite, and at most a quarter of the largest
// f32. `importance` has a number for each column, or is empty: those not > 0 count as 0.
Status fit_zero_points(const ZeroPointFit& how, const float* w, std::int64_t rows,
                       std::int64_t columns, std::span<const float> importance, GridRows& out);

// Scales and biases of lsq in f32, where a bias is any number: [rows, columns / group] each.
// `importance` as above.
Status fit_real(int bits, int group, const float* w, std::int64_t rows, std::int64_t columns,
                std::span<const float> importance, std::vector<float>& scales,
                std::vector<float>& biases);

// The nearest scale that such a grid has; 0 and infinities come back.
float zero_point_scale(float scale, DType params, int bits);

// Its bias, -scale * zero, exactly, or rounded to f16 or bf16; never -0.
float zero_point_bias(float scale, float zero, DType dtype);

}  // namespace bittern
