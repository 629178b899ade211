// The rules of qdq_affine_init for one group, in plain scalar form: all of `ref`, and what `cpu`
// and `cuda` do with the rare group that is not finite.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>

#include "core/numerics.h"

namespace bittern::affine {

// x rounded to S, the dtype of scales and biases.
template <class S>
Math<S> stored(Math<S> x) {
  return to_math(from_math<S>(x));
}

template <class F>
struct Range {
  F min = std::numeric_limits<F>::infinity(), max = -std::numeric_limits<F>::infinity();
  BITTERN_HOST_DEVICE bool empty() const { return min > max; }
  BITTERN_HOST_DEVICE bool overflows() const { return !empty() && !std::isfinite(max - min); }
};

template <class F>
Range<F> finite_range(std::span<const F> w) {
  Range<F> r;
  for (const F x : w) {
    if (!std::isfinite(x)) continue;
    r.min = std::min(r.min, x);
    r.max = std::max(r.max, x);
  }
  return r;
}

template <class F>
struct Params {
  F s = 1, b = 0;
};

// s and b as stored: `round` rounds to their dtype, whose largest finite value is `largest`.
template <class F, class Round>
BITTERN_HOST_DEVICE Params<F> minmax_params(const Range<F>& r, std::int32_t bins, F largest,
                                            const Round& round) {
  if (r.empty()) return {};
  const F n = static_cast<F>(bins - 1);
  F s = r.overflows() ? (r.max / 2 - r.min / 2) / (n / 2) : (r.max - r.min) / n;
  s = round(std::min(s, largest));
  return {s > 0 ? s : F(1), r.min + F(0)};
}
template <class S>
Params<Math<S>> minmax_params(const Range<Math<S>>& r, std::int32_t bins) {
  return minmax_params(r, bins, max_finite<S>(), stored<S>);
}

// s and b before rounding to their dtype. For a range that does not overflow.
template <class F>
BITTERN_HOST_DEVICE Params<F> mlx_params(const Range<F>& r, std::int32_t bins) {
  if (r.empty()) return {};
  const F s = std::max((r.max - r.min) / static_cast<F>(bins - 1), F(1e-7));
  if (bins == 2) return {s, r.min + F(0)};
  const bool negative = std::abs(r.min) > std::abs(r.max);
  const F step = negative ? s : -s, edge = negative ? r.min : r.max;
  const F k = std::nearbyint(edge / step);
  if (k == 0) return {step, F(0)};
  return {edge / k, edge};
}

// ---- lsq ----

constexpr int kMostFits = 20;

// How many ranges it starts from. With more bins than 32 the others gain little (4 % of the squared
// error at 6 bits, 1 % at 8) and take 10 to 20 fits each.
BITTERN_HOST_DEVICE constexpr int lsq_starts(std::int32_t bins) { return bins <= 32 ? 4 : 1; }

// s and b of the k-th range, stored, from minmax's; s is NaN where they are none. k = 0 is minmax.
template <class F, class Round>
BITTERN_HOST_DEVICE Params<F> lsq_start(const Params<F>& minmax, std::int32_t bins, int k,
                                        const Round& round) {
  if (k == 0) return minmax;
  const F share = k == 1 ? F(0.85) : k == 2 ? F(0.7) : F(0.55);
  const F shift = k == 1 ? F(0.075) : k == 2 ? F(0.15) : F(0.225);
  const F range = static_cast<F>(bins - 1) * minmax.s;
  const Params<F> p{round(minmax.s * share), round(minmax.b + range * shift) + F(0)};
  if (p.s > 0 && std::isfinite(p.b)) return p;
  return {std::numeric_limits<F>::quiet_NaN(), 0};
}

// Whether the error `after` takes the place of `before`.
BITTERN_HOST_DEVICE inline bool gains(double before, double after) {
  return before >= 0x1p-800 && std::isfinite(before) && after < before * (1 - 0x1p-20);
}

// x / s with one correction, z = x * (1 / s), z = fma(fma(-z, s, x), 1 / s, z), is all that codes
// need where
//   - they round half away, and s has at most 11 bits (a stored half). The remainder is exact, so
//     x / s is known to 2^-47 of itself before the last rounding. For every h = k + 1/2 up to
//     255.5, h s has at most 9 + 11 bits: where x / s >= h, z is, too; where x < h s, x is at least
//     one ulp below it, hence x / s more than half an ulp below h, and z < h.
//   - they round half to even, and s is a half over an integer up to 255, rounded (or mlx's least,
//     1e-7): QdqAffineInit.OneCorrectionDivides tries all x next to every h s, for all such s.
// For ordinary s and x, as usual.
BITTERN_HOST_DEVICE inline float divide_once(float x, float s, float inverse) {
  const float z = x * inverse;
  return std::fma(std::fma(-z, s, x), inverse, z);
}

// clamp(A(z), 0, n) and clamp(R(z), 0, n); 0 for NaN.
template <class F>
BITTERN_HOST_DEVICE std::uint8_t code_half_away(F z, F n) {
  if (!(z > 0)) return 0;
  z = std::min(z, n);
  const F whole = std::trunc(z);
  return static_cast<std::uint8_t>(z - whole >= F(0.5) ? whole + 1 : whole);
}
template <class F>
BITTERN_HOST_DEVICE std::uint8_t code_half_even(F z, F n) {
  if (!(z > 0)) return 0;
  return static_cast<std::uint8_t>(std::nearbyint(std::min(z, n)));
}

// As minmax: half away from zero. `halved` is for a range that overflows.
template <class F>
BITTERN_HOST_DEVICE std::uint8_t minmax_code(F w, Params<F> p, std::int32_t bins, bool halved) {
  const F z = halved ? (w / 2 - p.b / 2) / (p.s / 2) : (w - p.b) / p.s;
  return code_half_away(z, static_cast<F>(bins - 1));
}
template <class F>
BITTERN_HOST_DEVICE std::uint8_t mlx_code(F w, Params<F> p, std::int32_t bins) {
  return code_half_even((w - p.b) / p.s, static_cast<F>(bins - 1));
}

}  // namespace bittern::affine
