// The methods beside minmax: MLX's own rule, and the fit by least squares.
#include <algorithm>
#include <bit>
#include <cmath>

#include "ops/affine/qdq_affine_init/qdq_affine_init_test.h"

namespace bittern {
namespace {

using namespace qdq_affine_init_test;

// MLX's CPU rule as its source reads, one group at a time.
template <class X>
void expect_mlx(const std::vector<X>& w, std::int64_t size, std::int32_t bits) {
  const auto r = init<X>(group_of(static_cast<std::size_t>(size), bits, AffineMethod::mlx), w);
  const float n = static_cast<float>((1 << bits) - 1), eps = 1e-7f;
  for (std::size_t first = 0, g = 0; first < w.size();
       first += static_cast<std::size_t>(size), ++g) {
    float w_min = kInf, w_max = -kInf;
    for (std::size_t j = 0; j < static_cast<std::size_t>(size); ++j) {
      w_min = std::min(w_min, to_math(w[first + j]));
      w_max = std::max(w_max, to_math(w[first + j]));
    }
    float scale = (w_max - w_min) / n;
    if (scale < eps) scale = eps;
    float bias = w_min;
    if (bits > 1) {
      const bool mask = std::fabs(w_min) > std::fabs(w_max);
      if (!mask) scale = -scale;
      const float edge = mask ? w_min : w_max;
      const float q0 = std::rint(edge / scale);
      bias = 0;
      if (q0 != 0) {
        scale = edge / q0;
        bias = edge;
      }
    }
    ASSERT_EQ(r.s(g), static_cast<double>(to_math(from_math<X>(scale)))) << bits << " group " << g;
    ASSERT_EQ(r.b(g), static_cast<double>(to_math(from_math<X>(bias)))) << bits << " group " << g;
    for (std::size_t j = 0; j < static_cast<std::size_t>(size); ++j) {
      const float code = std::rint((to_math(w[first + j]) - bias) / scale);
      ASSERT_EQ(r.q[first + j], std::min(std::max(code, 0.0f), n)) << bits << " group " << g;
    }
  }
}

template <class X>
void expect_mlx_on_many() {
  oracle::Rng rng(11);
  for (const std::int32_t bits : {1, 2, 3, 4, 5, 6, 7, 8}) {
    for (const std::int64_t size : {32, 64, 128}) {
      std::vector<X> w;
      for (int g = 0; g < 120; ++g) {
        const double scale = std::ldexp(1.0, static_cast<int>(rng.below(40)) - 30);
        const double centre = static_cast<double>(rng.below(3) - 1) * scale * 3;
        // Multiples of a quarter make ties; groups of one value and of zeros are among them.
        const double grid = rng.chance(2) ? 0 : 0.25 * scale;
        const double spread = rng.chance(8) ? 0 : scale;
        for (std::int64_t j = 0; j < size; ++j) {
          double x = centre + spread * rng.normal();
          if (grid != 0) x = grid * std::nearbyint(x / grid);
          w.push_back(from_math<X>(static_cast<float>(x)));
        }
      }
      expect_mlx(w, size, bits);
    }
  }
}

TEST(QdqAffineInit, MlxIsMlxsRule) {
  expect_mlx_on_many<float>();
  expect_mlx_on_many<f16>();
  expect_mlx_on_many<bf16>();
}

TEST(QdqAffineInit, MlxByHand) {
  const float eps = 1e-7f;
  auto r = init<float>(group_of(2, 4, AffineMethod::mlx),
                       {3.14f, 3.14f, -3.14f, -3.14f, 0.0f, -0.0f, 5e-8f, 4e-8f, 6e-8f, -3e-8f});
  EXPECT_EQ(r.scales[0], 3.14f / std::rint(3.14f / -eps));
  EXPECT_LT(r.scales[1], 0.0f);
  EXPECT_EQ(r.scales[2], -eps);
  EXPECT_EQ(r.scales[3], -eps);
  EXPECT_EQ(r.scales[4], -6e-8f);
  EXPECT_EQ(r.biases, (std::vector<float>{3.14f, -3.14f, 0, 0, 6e-8f}));
  EXPECT_EQ(r.q, (Codes{0, 0, 0, 0, 0, 0, 0, 0, 0, 2}));  // 1.5 goes to even
  r = init<float>(group_of(3, 1, AffineMethod::mlx), {-1.0f, 1.0f, 0.0f});
  EXPECT_EQ(r.s(), 2.0);
  EXPECT_EQ(r.b(), -1.0);
  EXPECT_EQ(r.q, (Codes{0, 1, 0}));  // so does 0.5
}

template <class X, class S>
long double squared_error(const Output<X, S>& r, const std::vector<X>& w, std::size_t size,
                          std::size_t group, const std::vector<float>& importance) {
  using F = Math<X>;
  long double sum = 0;
  for (std::size_t i = group * size; i < (group + 1) * size; ++i) {
    const F y =
        std::fma(static_cast<F>(r.q[i]), to_math(r.scales[group]), to_math(r.biases[group]));
    const long double d = static_cast<long double>(to_math(w[i])) - static_cast<long double>(y);
    sum += d * d * (importance.empty() ? 1.0f : importance[i % importance.size()]);
  }
  return sum;
}

// Never worse, group by group; the ratio of all errors.
template <class X, class S = X>
double lsq_gain(const std::vector<X>& w, std::size_t size, std::int32_t bits,
                const std::vector<float>& importance = {}) {
  AffineDesc d = group_of(size, bits);
  d.axis_size = importance.empty() ? d.group_size : static_cast<std::int64_t>(importance.size());
  const auto before = init<X, S>(d, w);
  d.method = AffineMethod::lsq;
  const auto after = init<X, S>(d, w, importance);
  long double all_before = 0, all_after = 0;
  for (std::size_t g = 0; g < w.size() / size; ++g) {
    const long double b = squared_error(before, w, size, g, importance);
    const long double a = squared_error(after, w, size, g, importance);
    EXPECT_LE(a, b) << "group " << g << " of " << size << ", " << bits << " bits";
    all_before += b;
    all_after += a;
  }
  return all_before == 0 ? 1.0 : static_cast<double>(all_after / all_before);
}

TEST(QdqAffineInit, LsqGainsWhatItShould) {
  const auto w = gaussian<float>(64 * 3000, 5);
  EXPECT_NEAR(lsq_gain(w, 64, 4), 0.839, 0.008);
  EXPECT_NEAR(lsq_gain(w, 64, 3), 0.738, 0.012);
  EXPECT_NEAR(lsq_gain(w, 64, 2), 0.51, 0.02);
  EXPECT_NEAR(lsq_gain(w, 32, 4), 0.815, 0.012);
}

// The squared error of the search from minmax's range alone, or from its middle `share`.
double error_from(const double* w, std::size_t size, int bins, const float* c, double share) {
  const auto [low, high] = std::minmax_element(w, w + size);
  const double n = bins - 1, whole = (*high - *low) / n;
  double s = share * whole, b = *low + (1 - share) / 2 * n * whole;
  std::vector<double> q(size);
  const auto quantize = [&] {
    for (std::size_t i = 0; i < size; ++i) q[i] = std::clamp(std::round((w[i] - b) / s), 0.0, n);
  };
  quantize();
  for (int round = 0; round < 20; ++round) {
    double sum = 0, sq = 0, sqq = 0, su = 0, squ = 0;
    for (std::size_t i = 0; i < size; ++i) {
      const double u = w[i] - *low;
      sum += c[i];
      sq += c[i] * q[i];
      sqq += c[i] * q[i] * q[i];
      su += c[i] * u;
      squ += c[i] * q[i] * u;
    }
    const double r = 1 / (sum * sqq - sq * sq), next = (sum * squ - sq * su) * r;
    if (!(next > 0) || !std::isfinite(next)) break;
    s = next;
    b = *low + (sqq * su - sq * squ) * r;
    quantize();
  }
  double error = 0;
  for (std::size_t i = 0; i < size; ++i) error += c[i] * std::pow(w[i] - (q[i] * s + b), 2);
  return error;
}

TEST(QdqAffineInit, LsqIsTheBestOfItsStarts) {
  oracle::Rng rng(17);
  constexpr std::size_t kSize = 64, kGroups = 400;
  const auto w = gaussian<double>(kSize * kGroups, 8, true);
  std::vector<float> importance(kSize);
  for (float& c : importance) c = static_cast<float>(std::exp(rng.normal()));
  for (const int bins : {2, 3, 4, 8, 16, 32, 33, 64, 256}) {
    AffineDesc d = group_of(kSize, 0, AffineMethod::lsq);
    d.n_bins = bins;
    const auto found = init<double>(d, w, importance);
    double all = 0, one = 0, best = 0;
    std::size_t worse = 0;
    for (std::size_t g = 0; g < kGroups; ++g) {
      const double* const group = w.data() + g * kSize;
      const auto error = static_cast<double>(squared_error(found, w, kSize, g, importance));
      const double first = error_from(group, kSize, bins, importance.data(), 1);
      double least = first;
      for (const double share : {0.85, 0.7, 0.55})
        least = std::min(least, error_from(group, kSize, bins, importance.data(), share));
      all += error;
      one += first;
      best += least;
      // Two searches may part at a tie, which their last bits decide.
      worse += error > (bins <= 32 ? least : first) * (1 + 1e-5);
    }
    EXPECT_LE(worse, kGroups / 50) << bins;
    EXPECT_NEAR(all / (bins <= 32 ? best : one), 1, 1e-3) << bins;
    if (bins > 2 && bins <= 32) {
      EXPECT_LT(all, 0.97 * one) << bins;
    }
  }
}

template <class X, class S>
void expect_never_worse() {
  std::vector<float> importance(64 * 6);
  oracle::Rng rng(9);
  for (float& c : importance) c = static_cast<float>(rng.chance(5) ? 0.0 : rng.uniform());
  for (const bool heavy_tailed : {false, true}) {
    for (const std::int32_t bits : {1, 2, 4, 8}) {
      const auto w = gaussian<X>(64 * 60, 21, heavy_tailed);
      EXPECT_LE((lsq_gain<X, S>(w, 64, bits)), 1.0);
      EXPECT_LE((lsq_gain<X, S>(w, 64, bits, importance)), 1.0);
      EXPECT_LE((lsq_gain<X, S>(w, 3, bits)), 1.0);
      EXPECT_LE((lsq_gain<X, S>(w, 48, bits, importance)), 1.0);
    }
  }
  // A grid that minmax hits exactly, and one it nearly does: nothing to gain.
  for (const int off : {0, 1}) {
    std::vector<X> w;
    for (int i = 0; i < 64 * 8; ++i)
      w.push_back(from_math<X>(
          static_cast<Math<X>>(oracle::step(dtype_of<X>(), 0.1 * static_cast<double>(rng.below(16)),
                                            off * static_cast<int>(rng.below(3))))));
    EXPECT_LE((lsq_gain<X, S>(w, 64, 4)), 1.0);
  }
}

TEST(QdqAffineInit, LsqIsNeverWorse) {
  expect_never_worse<float, float>();
  expect_never_worse<double, double>();
  expect_never_worse<f16, f16>();
  expect_never_worse<bf16, bf16>();
  expect_never_worse<bf16, float>();
}

TEST(QdqAffineInit, LsqByHand) {
  // Codes 0 0 1 3 of minmax; least squares: s = 23.6 / 24, b = 1.05 - s, which keeps them.
  const auto r = init<double>(group_of(4, 2, AffineMethod::lsq), {0.0, 0.1, 1.1, 3.0});
  EXPECT_NEAR(r.s(), 0.983333333333, 1e-9);
  EXPECT_NEAR(r.b(), 0.066666666667, 1e-9);
  EXPECT_EQ(r.q, (Codes{0, 0, 1, 3}));
}

TEST(QdqAffineInit, Importance) {
  const AffineDesc d = [] {
    AffineDesc x = group_of(64, 3, AffineMethod::lsq);
    x.axis_size = 128;
    return x;
  }();
  const auto w = gaussian<float>(128 * 9, 31);
  const auto plain = init<float>(d, w);
  const auto ones = init<float>(d, w, std::vector<float>(128, 1.0f));
  EXPECT_EQ(plain.scales, ones.scales);
  EXPECT_EQ(plain.biases, ones.biases);
  EXPECT_EQ(plain.q, ones.q);

  // What does not count as a weight counts as 0.
  std::vector<float> odd(128, 1.0f), zero(128, 1.0f);
  const float ignored[] = {kNan, kInf, -kInf, -1.0f, -0.0f};
  for (std::size_t j = 0; j < 128; j += 7) {
    odd[j] = ignored[j % 5];
    zero[j] = 0.0f;
  }
  const auto with_odd = init<float>(d, w, odd), with_zero = init<float>(d, w, zero);
  EXPECT_EQ(with_odd.scales, with_zero.scales);
  EXPECT_EQ(with_odd.biases, with_zero.biases);
  EXPECT_EQ(with_odd.q, with_zero.q);
  EXPECT_NE(with_odd.q, plain.q);

  // No weight at all: minmax.
  AffineDesc m = d;
  m.method = AffineMethod::minmax;
  EXPECT_EQ(init<float>(d, w, std::vector<float>(128, 0.0f)).q, init<float>(m, w).q);
}

}  // namespace
}  // namespace bittern
