#include "codec/special.h"

#include <cmath>

namespace bittern::codec {
namespace {

constexpr double kInverseSqrt2Pi = 0x1.9884533d43651p-2;  // (2 pi)^-1/2
constexpr double kPi = 0x1.921fb54442d18p+1;

// base^(twice/2) for twice >= -1.
double half_power(double base, std::int64_t twice) {
  if (twice < 0) return 1 / std::sqrt(base);
  double result = twice % 2 != 0 ? std::sqrt(base) : 1.0;
  for (std::int64_t n = twice / 2; n != 0; n /= 2, base *= base)
    if (n % 2 != 0) result *= base;
  return result;
}

// The continued fraction of the incomplete beta function I_y(a, a), by Lentz's method; it converges
// fast for y <= 1/2.
double beta_fraction(double a, double y) {
  constexpr double kTiny = 1e-300;
  const auto nonzero = [](double v) { return v < kTiny && v > -kTiny ? kTiny : v; };
  double c = 1, d = 1 / nonzero(1 - 2 * a * y / (a + 1)), h = d;
  for (int k = 1; k < 10000; ++k) {
    const double m = k, even = m * (a - m) * y / ((a + 2 * m - 1) * (a + 2 * m));
    d = 1 / nonzero(1 + even * d);
    c = nonzero(1 + even / c);
    h *= d * c;
    const double odd = -(a + m) * (2 * a + m) * y / ((a + 2 * m) * (a + 2 * m + 1));
    d = 1 / nonzero(1 + odd * d);
    c = nonzero(1 + odd / c);
    const double factor = d * c;
    h *= factor;
    if (factor - 1 < 1e-16 && 1 - factor < 1e-16) break;
  }
  return h;
}

}  // namespace

Coordinate::Coordinate(std::int64_t dim)
    : dim_(dim), end_(dim > 0 ? std::sqrt(static_cast<double>(dim)) : 38.0), constant_(0) {
  if (dim == 0) return;
  constant_ = dim % 2 == 0 ? 1 / kPi : 0.5;
  for (std::int64_t d = dim % 2 == 0 ? 2 : 3; d < dim; d += 2)
    constant_ *= static_cast<double>(d) / static_cast<double>(d - 1);
}

double Coordinate::density(double t) const {
  if (dim_ == 0) return kInverseSqrt2Pi * exp(-t * t / 2);
  return constant_ / end_ * half_power(1 - t * t / static_cast<double>(dim_), dim_ - 3);
}

double Coordinate::tail_moment(double t) const {
  if (t >= end_) return 0;
  if (dim_ == 0) return density(t);
  const auto d = static_cast<double>(dim_);
  return constant_ * end_ / (d - 1) * half_power(1 - t * t / d, dim_ - 1);
}

double Coordinate::tail(double t) const {
  if (t >= end_) return 0;
  if (dim_ > 0) {
    const double a = static_cast<double>(dim_ - 1) / 2;
    return tail_moment(t) / end_ * beta_fraction(a, (1 - t / end_) / 2);
  }
  if (t < 2) {  // 1/2 minus density * (t + t^3/3 + t^5/(3 5) + ...)
    double term = t, sum = t;
    for (int n = 3; term > 1e-18 * sum; n += 2) sum += (term *= t * t / n);
    return 0.5 - density(t) * sum;
  }
  double fraction = t;  // density / (t + 1/(t + 2/(t + 3/...)))
  for (int n = 100; n >= 1; --n) fraction = t + n / fraction;
  return density(t) / fraction;
}

double Coordinate::quantile(double upper) const {
  double low = 0, high = end_;
  for (int i = 0; i < 60; ++i) {
    const double middle = (low + high) / 2;
    (tail(middle) > upper ? low : high) = middle;
  }
  return (low + high) / 2;
}

}  // namespace bittern::codec
