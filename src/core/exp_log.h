// exp and log in f64 from + - * / alone, for tables and single numbers, so that every platform
// computes the same bits.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

namespace bittern::exp_log {

inline constexpr double kLn2High = 0x1.62e42fefp-1;       // its upper 32 bits: k * it is exact
inline constexpr double kLn2Low = 0x1.473de6af278edp-34;  // ln 2 - kLn2High

inline double power_of_two(int k) {
  return std::bit_cast<double>(static_cast<std::uint64_t>(k + 1023) << 52);
}

// |x| < 700
inline double exp(double x) {
  const double k = std::floor(x / (kLn2High + kLn2Low) + 0.5);
  const double r = (x - k * kLn2High) - k * kLn2Low;  // |r| <= 0.35
  double sum = 1, term = 1;
  for (int n = 1; n <= 18; ++n) sum += (term *= r / n);
  return sum * power_of_two(static_cast<int>(k));
}

// x > 0, normal
inline double log(double x) {
  const auto bits = std::bit_cast<std::uint64_t>(x);
  int k = static_cast<int>(bits >> 52) - 1023;
  double m = std::bit_cast<double>((bits & 0xfffffffffffffu) | std::uint64_t{1023} << 52);
  if (m > 1.4142135623730951) {
    m /= 2;
    ++k;
  }
  // log m = 2 artanh z
  const double z = (m - 1) / (m + 1), z2 = z * z;
  double sum = 0, power = z;
  for (int n = 1; n <= 41; n += 2, power *= z2) sum += power / n;
  return k * kLn2High + (k * kLn2Low + 2 * sum);
}

}  // namespace bittern::exp_log
