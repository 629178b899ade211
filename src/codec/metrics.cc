#include "bittern/metrics.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/float_mode.h"

namespace bittern {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

double dot(std::span<const float> x, std::span<const float> y) {
  double sum = 0;
  for (std::size_t i = 0; i < x.size(); ++i)
    sum += static_cast<double>(x[i]) * static_cast<double>(y[i]);
  return sum;
}

double log_sum_exp(std::span<const float> x) {
  const double most = *std::max_element(x.begin(), x.end());
  double sum = 0;
  for (const float v : x) sum += std::exp(static_cast<double>(v) - most);
  return most + std::log(sum);
}

double ratio(double error, double size) {
  if (error == 0) return 0;
  return size == 0 ? std::numeric_limits<double>::infinity() : error / size;
}

}  // namespace

double relative_mse(std::span<const float> x, std::span<const float> y) noexcept {
  const FloatMode mode;
  if (x.size() != y.size()) return kNan;
  double error = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double d = static_cast<double>(x[i]) - static_cast<double>(y[i]);
    error += d * d;
  }
  return ratio(error, dot(x, x));
}

double cosine_similarity(std::span<const float> x, std::span<const float> y) noexcept {
  const FloatMode mode;
  if (x.size() != y.size()) return kNan;
  const double xx = dot(x, x), yy = dot(y, y);
  if (xx == 0 || yy == 0) return xx == yy ? 1 : 0;
  return dot(x, y) / (std::sqrt(xx) * std::sqrt(yy));
}

double logit_error(std::span<const float> x, std::span<const float> y) noexcept {
  const FloatMode mode;
  if (x.size() != y.size()) return kNan;
  double error = 0, most = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    error = std::max(error, std::fabs(static_cast<double>(x[i]) - static_cast<double>(y[i])));
    most = std::max(most, std::fabs(static_cast<double>(x[i])));
  }
  return ratio(error, most);
}

double attention_kl(std::span<const float> x, std::span<const float> y) noexcept {
  const FloatMode mode;
  if (x.size() != y.size()) return kNan;
  if (x.empty()) return 0;
  const double zx = log_sum_exp(x), zy = log_sum_exp(y);
  double kl = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double log_p = static_cast<double>(x[i]) - zx, log_q = static_cast<double>(y[i]) - zy;
    const double p = std::exp(log_p);
    if (p > 0) kl += p * (log_p - log_q);
  }
  return kl;
}

double bits_per_value(std::int64_t dim, std::int32_t bits, DType scale) noexcept {
  const FloatMode mode;
  const auto bytes =
      static_cast<double>(4 * packed_words(dim, bits)) + static_cast<double>(size_of(scale));
  return 8 * bytes / static_cast<double>(dim);
}

}  // namespace bittern
