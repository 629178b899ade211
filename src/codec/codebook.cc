#include <cmath>
#include <limits>
#include <string>

#include "bittern/codec.h"
#include "codec/special.h"
#include "core/float_mode.h"
#include "core/guarded.h"

namespace bittern {
namespace {

using codec::Coordinate;

// The positive half of a symmetric codebook, in units of one standard deviation.
struct Half {
  std::vector<double> levels;
  double distortion;
};

// Cell i of the positive half runs from edge i to edge i + 1.
struct Cells {
  std::vector<double> edges, mass, mean, edge_density;

  Cells(const Coordinate& law, const std::vector<double>& c) {
    const std::size_t n = c.size();
    std::vector<double> tail(n + 1), moment(n + 1);
    edges.resize(n + 1);
    edge_density.resize(n + 1);
    mass.resize(n);
    mean.resize(n);
    for (std::size_t i = 0; i <= n; ++i) {
      edges[i] = i == 0 ? 0 : i == n ? law.end() : (c[i - 1] + c[i]) / 2;
      tail[i] = law.tail(edges[i]);
      moment[i] = law.tail_moment(edges[i]);
      edge_density[i] = i == n ? 0 : law.density(edges[i]);
    }
    for (std::size_t i = 0; i < n; ++i) {
      mass[i] = tail[i] - tail[i + 1];
      mean[i] = (moment[i] - moment[i + 1]) / mass[i];
    }
  }
};

// Solves c = mean(c): a few Lloyd steps, then Newton, whose Jacobian is tridiagonal.
Half lloyd_max(const Coordinate& law, const Coordinate& companded, double companded_scale,
               std::int32_t bits) {
  const std::size_t n = std::size_t{1} << (bits - 1);
  std::vector<double> c(n), diagonal(n), rest(n);
  for (std::size_t i = 0; i < n; ++i) {
    const double upper =
        0.5 - (static_cast<double>(i) + 0.5) / static_cast<double>(std::size_t{1} << bits);
    c[i] = companded_scale * companded.quantile(upper);
  }
  for (int step = 0; step < 50; ++step) c = Cells(law, c).mean;
  for (int step = 0; step < 20; ++step) {
    const Cells cells(law, c);
    const auto upper = [&](std::size_t i) {  // d mean[i] / d c[i+1]
      return i + 1 == n ? 0
                        : 0.5 * cells.edge_density[i + 1] * (cells.edges[i + 1] - cells.mean[i]) /
                              cells.mass[i];
    };
    const auto lower = [&](std::size_t i) {  // d mean[i] / d c[i-1]
      return i == 0
                 ? 0
                 : 0.5 * cells.edge_density[i] * (cells.mean[i] - cells.edges[i]) / cells.mass[i];
    };
    // (I - d mean / d c) delta = mean - c, by elimination downwards and substitution upwards.
    for (std::size_t i = 0; i < n; ++i) {
      diagonal[i] = 1 - upper(i) - lower(i);
      rest[i] = cells.mean[i] - c[i];
      if (i == 0) continue;
      const double factor = lower(i) / diagonal[i - 1];
      diagonal[i] -= factor * upper(i - 1);
      rest[i] += factor * rest[i - 1];
    }
    double largest = 0;
    for (std::size_t i = n; i-- > 0;) {
      if (i + 1 < n) rest[i] += upper(i) * rest[i + 1];
      rest[i] /= diagonal[i];
      c[i] += rest[i];
      largest = std::fmax(largest, std::fabs(rest[i]));
    }
    if (largest < 1e-15) break;
  }
  // E|t - c|^2 = E t^2 - E c^2 at a fixed point; E t^2 = 1.
  const Cells cells(law, c);
  double kept = 0;
  for (std::size_t i = 0; i < n; ++i) kept += c[i] * c[i] * cells.mass[i];
  return {std::move(c), 1 - 2 * kept};
}

std::vector<float> halfway(std::span<const float> levels) {
  std::vector<float> out;
  for (std::size_t i = 1; i < levels.size(); ++i) {
    out.push_back(static_cast<float>(static_cast<double>(levels[i - 1]) / 2 +
                                     static_cast<double>(levels[i]) / 2));
  }
  return out;
}

Codebook from_half(const Half& half, std::int64_t dim) {
  const double scale = std::sqrt(static_cast<double>(dim));
  const std::size_t n = half.levels.size();
  Codebook book;
  book.levels.resize(2 * n);
  for (std::size_t i = 0; i < n; ++i) {
    const auto level = static_cast<float>(half.levels[i] / scale);
    book.levels[n + i] = level;
    book.levels[n - 1 - i] = -level;
  }
  book.boundaries = halfway(book.levels);
  book.distortion = half.distortion;
  return book;
}

Status check(std::string_view what, std::int64_t dim, std::int32_t bits) {
  return check_aura_row(what, "dim", dim, bits, Rotation::identity);
}

}  // namespace

// The best density of levels is the cube root of the distribution's density: that of a sphere in
// d/3 + 2 dimensions, or of a Gaussian sqrt(3) times as wide. The search starts at its quantiles.
Result<Codebook> sphere_codebook(std::int64_t dim, std::int32_t bits) noexcept try {
  const FloatMode mode;
  if (Status s = check("sphere_codebook", dim, bits); !s.ok()) return s;
  const Coordinate law(dim), companded(dim / 3 + 2);
  return from_half(lloyd_max(law, companded, law.end() / companded.end(), bits), dim);
} catch (...) {
  return caught("sphere_codebook");
}

Result<Codebook> gaussian_codebook(std::int64_t dim, std::int32_t bits) noexcept try {
  const FloatMode mode;
  if (Status s = check("gaussian_codebook", dim, bits); !s.ok()) return s;
  const Coordinate law(0);
  return from_half(lloyd_max(law, law, std::sqrt(3.0), bits), dim);
} catch (...) {
  return caught("gaussian_codebook");
}

Result<Codebook> user_codebook(std::span<const float> levels) noexcept try {
  const FloatMode mode;
  const std::size_t n = levels.size();
  if (n < 2 || n > 256 || (n & (n - 1)) != 0) {
    return invalid("user_codebook: levels: " + std::to_string(n) +
                   " of them, expected 2, 4, 8, ... 256");
  }
  if (Status s =
          check_codebook("user_codebook", "levels", levels.data(), static_cast<std::int64_t>(n));
      !s.ok())
    return s;
  for (std::size_t i = 1; i < n; ++i) {
    if (!(levels[i] > levels[i - 1])) {
      return invalid("user_codebook: levels: [" + std::to_string(i) +
                     "] is not greater than the level before it, expected ascending values");
    }
  }
  return Codebook{
      {levels.begin(), levels.end()}, halfway(levels), std::numeric_limits<double>::quiet_NaN()};
} catch (...) {
  return caught("user_codebook");
}

Result<std::vector<float>> midpoints(std::span<const float> levels) noexcept {
  const FloatMode mode;
  return guarded("midpoints", [&]() -> Result<std::vector<float>> { return halfway(levels); });
}

Result<double> sphere_distortion(std::int64_t dim, std::span<const float> levels,
                                 std::span<const float> boundaries) noexcept try {
  const FloatMode mode;
  constexpr std::string_view kName = "sphere_distortion";
  if (Status s = check(kName, dim, 1); !s.ok()) return s;
  if (levels.empty() || boundaries.size() != levels.size() - 1) {
    return invalid("sphere_distortion: boundaries: " + std::to_string(boundaries.size()) +
                   " of them, expected one less than levels, " + std::to_string(levels.size()));
  }
  const auto count = static_cast<std::int64_t>(boundaries.size());
  if (Status s = check_boundaries(kName, "boundaries", boundaries.data(), count); !s.ok()) return s;
  if (Status s = check_codebook(kName, "levels", levels.data(), count + 1); !s.ok()) return s;
  // E(t - c)^2 over a cell = E t^2 - 2 c E t + c^2 mass, with P(T > t) and E[T; T > t] of any sign.
  const Coordinate law(dim);
  const double scale = law.end();
  const auto tail = [&](double t) { return t >= 0 ? law.tail(t) : 1 - law.tail(-t); };
  const auto moment = [&](double t) { return law.tail_moment(std::fabs(t)); };
  const auto edge = [&](std::int64_t i) {
    if (i < 0) return -scale;
    if (i >= count) return scale;
    const double t = scale * static_cast<double>(boundaries[static_cast<std::size_t>(i)]);
    return std::fmin(std::fmax(t, -scale), scale);
  };
  double sum = 1;
  for (std::int64_t i = 0; i <= count; ++i) {
    const double low = edge(i - 1), high = edge(i);
    const double c = scale * static_cast<double>(levels[static_cast<std::size_t>(i)]);
    sum += c * (c * (tail(low) - tail(high)) - 2 * (moment(low) - moment(high)));
  }
  return sum;
} catch (...) {
  return caught("sphere_distortion");
}

}  // namespace bittern
