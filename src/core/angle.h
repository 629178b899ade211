// cos and sin in fixed operations, each line one IEEE operation (or one fma) in f64, so `ref` and
// every SIMD target (cpu/angle-inl.h, line by line the same) give the same bits.
//
// |angle| < 2^30: within 2^-35 of the truth (0.501 ulp once rounded to f32, however near the angle
// is to a multiple of pi / 2 for which the result is not tiny). Larger angles, infinities and NaN
// give NaN.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/host_device.h"

namespace bittern::angle {

inline constexpr double kMost = 0x1p30;
inline constexpr double kTwoOverPi = 0x1.45f306dc9c883p-1;
inline constexpr double kHalfPiHigh = 0x1.921fb54442d18p0;
inline constexpr double kHalfPiLow = 0x1.1a62633145c07p-54;  // pi / 2 - kHalfPiHigh
inline constexpr double kRounder =
    0x1.8p52;  // adding it leaves the nearest integer in the low bits

// Taylor's coefficients, for |r| <= pi / 4: of r^3, r^5 ... r^11 in sin, of r^2, r^4 ... r^12 in
// cos.
constexpr double sin_term(int i) {
  constexpr double kTerms[] = {-1.0 / 6, 1.0 / 120, -1.0 / 5040, 1.0 / 362880, -1.0 / 39916800};
  return kTerms[i];
}
constexpr double cos_term(int i) {
  constexpr double kTerms[] = {-1.0 / 2,    1.0 / 24,       -1.0 / 720,
                               1.0 / 40320, -1.0 / 3628800, 1.0 / 479001600};
  return kTerms[i];
}

struct CosSin {
  double cos, sin;
};

BITTERN_HOST_DEVICE inline CosSin cos_sin(double a) {
  if (!(std::fabs(a) < kMost)) a = std::numeric_limits<double>::quiet_NaN();
  const double shifted = std::fma(a, kTwoOverPi, kRounder);
  const double k = shifted - kRounder;
  double r = std::fma(k, -kHalfPiHigh, a);
  r = std::fma(k, -kHalfPiLow, r);
  const double r2 = r * r;
  double s = sin_term(4);
  for (int i = 3; i >= 0; --i) s = std::fma(s, r2, sin_term(i));
  s = std::fma(r * r2, s, r);
  double c = cos_term(5);
  for (int i = 4; i >= 0; --i) c = std::fma(c, r2, cos_term(i));
  c = std::fma(c, r2, 1.0);
  // Quarter turns; whatever they are of a NaN, the results are NaN.
  const std::uint64_t quarter = std::bit_cast<std::uint64_t>(shifted);
  const double cosine = (quarter & 1) != 0 ? s : c;
  const double sine = (quarter & 1) != 0 ? c : s;
  return {((quarter + 1) & 2) != 0 ? -cosine : cosine, (quarter & 2) != 0 ? -sine : sine};
}

}  // namespace bittern::angle
