#include <cmath>

#include "bittern/codec.h"
#include "codec/special.h"
#include "core/float_mode.h"
#include "core/guarded.h"
#include "core/split_mix.h"

namespace bittern {
namespace {

std::vector<float> random_signs(std::int64_t dim, std::uint64_t seed) {
  std::vector<float> signs(static_cast<std::size_t>(dim));
  std::uint64_t state = split_mix(seed + kGolden) | 1;
  for (float& sign : signs) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    sign = (state & 1) != 0 ? 1.0f : -1.0f;
  }
  return signs;
}

class Gaussians {
 public:
  explicit Gaussians(std::uint64_t seed) : state_(seed) {}
  void next_two(double* out) {
    for (;;) {
      const double a = uniform(), b = uniform(), s = a * a + b * b;
      if (!(s > 0 && s < 1)) continue;
      const double w = std::sqrt(-2 * codec::log(s) / s);
      out[0] = a * w;
      out[1] = b * w;
      return;
    }
  }

 private:
  double uniform() {  // in [-1, 1)
    return static_cast<double>(split_mix(state_ += kGolden) >> 11) * 0x1p-52 - 1;
  }
  std::uint64_t state_;
};

// Eight sums of every eighth product, then those in pairs: an order that vectors can keep.
double dot(const double* a, const double* b, std::size_t n) {
  double sum[8] = {};
  std::size_t i = 0;
  for (; i + 8 <= n; i += 8)
    for (std::size_t k = 0; k < 8; ++k) sum[k] += a[i + k] * b[i + k];
  for (std::size_t k = 0; i + k < n; ++k) sum[k] += a[i + k] * b[i + k];
  return ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
}

// Gram-Schmidt, row by row, each row twice: orthogonal to f64's precision.
std::vector<float> random_rotation(std::int64_t dim, std::uint64_t seed) {
  const auto d = static_cast<std::size_t>(dim);
  std::vector<double> q(d * d + 1);
  Gaussians gaussians(seed);
  for (std::size_t i = 0; i < d * d; i += 2) gaussians.next_two(&q[i]);
  for (std::size_t i = 0; i < d; ++i) {
    double* row = &q[i * d];
    for (int pass = 0; pass < 2; ++pass) {
      for (std::size_t k = 0; k < i; ++k) {
        const double along = dot(&q[k * d], row, d);
        for (std::size_t j = 0; j < d; ++j) row[j] -= along * q[k * d + j];
      }
    }
    const double length = std::sqrt(dot(row, row, d));
    for (std::size_t j = 0; j < d; ++j) row[j] /= length;
  }
  return {q.begin(), q.begin() + static_cast<std::ptrdiff_t>(d * d)};
}

}  // namespace

Result<std::vector<float>> make_rotation(Rotation rotation, std::int64_t dim,
                                         std::uint64_t seed) noexcept try {
  const FloatMode mode;
  if (Status s = check_aura_row("make_rotation", "dim", dim, 1, rotation); !s.ok()) return s;
  switch (rotation) {
    case Rotation::identity: break;
    case Rotation::hadamard: return random_signs(dim, seed);
    case Rotation::dense: return random_rotation(dim, seed);
  }
  return std::vector<float>();
} catch (...) {
  return caught("make_rotation");
}

}  // namespace bittern
