// Grids with integer zero points: the rules by hand, against all grids there are, and at the ends.
#include "convert/zero_points.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

namespace bittern {
namespace {

std::vector<float> noise(std::size_t count, std::uint32_t seed, float mean = 0) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(mean, 0.05f);
  std::vector<float> values(count);
  for (float& x : values) x = normal(random);
  return values;
}
GridRows fitted(const ZeroPointFit& how, const std::vector<float>& w, std::int64_t columns,
                std::span<const float> importance = {}) {
  GridRows out;
  const Status status = fit_zero_points(
      how, w.data(), static_cast<std::int64_t>(w.size()) / columns, columns, importance, out);
  EXPECT_TRUE(status.ok()) << status.message();
  return out;
}
double error_of(const std::vector<float>& w, const GridRows& grid, std::size_t columns,
                std::span<const float> importance = {}) {
  double sum = 0;
  for (std::size_t i = 0; i < w.size(); ++i) {
    const std::size_t g = i / static_cast<std::size_t>(grid.group);
    const double e =
        double{w[i]} - (double(grid.codes[i]) * double{grid.scales[g]} + double{grid.biases[g]});
    sum += e * e * (importance.empty() ? 1.0 : double{importance[i % columns]});
  }
  return sum;
}

// The least error of a group with this zero point, of scales from `largest` down to `smallest`.
double least_error(const std::vector<float>& w, int bits, int zero, double largest, double smallest,
                   bool of_either_sign = false) {
  const int top = (1 << bits) - 1;
  double least = std::numeric_limits<double>::infinity();
  for (double size = largest; size > smallest; size *= 0.999)
    for (const double scale : {size, of_either_sign ? -size : size}) {
      double sum = 0;
      for (const float x : w) {
        const double step =
            std::clamp(std::nearbyint(double{x} / scale), double(-zero), double(top - zero));
        sum += (double{x} - step * scale) * (double{x} - step * scale);
      }
      least = std::min(least, sum);
    }
  return least;
}

TEST(ZeroPoints, MinmaxByHand) {
  std::vector<float> w(32, 0.0f);
  w[3] = -2;
  w[7] = 13;
  w[8] = 0.5f;  // ties go to the even step
  w[9] = 1.5f;
  w[10] = -0.5f;
  const GridRows grid = fitted({.bits = 4, .group = 32, .method = AffineMethod::minmax}, w, 32);
  EXPECT_EQ(grid.scales, std::vector<float>{1});
  EXPECT_EQ(grid.biases, std::vector<float>{-2});
  EXPECT_EQ(grid.codes[3], 0);
  EXPECT_EQ(grid.codes[7], 15);
  EXPECT_EQ(grid.codes[8], 2);
  EXPECT_EQ(grid.codes[9], 4);
  EXPECT_EQ(grid.codes[10], 2);
  EXPECT_EQ(grid.codes[0], 2);
}

TEST(ZeroPoints, AreIntegersAndEveryNumberIsExact) {
  for (const int bits : {2, 3, 4, 5, 6, 8})
    for (const int group : {32, 64, 128})
      for (const DType params : {DType::f32, DType::f16, DType::bf16})
        for (const float mean : {0.0f, 0.03f, 0.4f, -0.4f}) {
          const std::vector<float> w = noise(5 * 256, 3, mean);
          double errors[2];
          for (const AffineMethod method : {AffineMethod::minmax, AffineMethod::lsq}) {
            const GridRows grid =
                fitted({.bits = bits, .group = group, .params = params, .method = method}, w, 256);
            for (std::size_t i = 0; i < grid.codes.size(); ++i) {
              const std::size_t g = i / static_cast<std::size_t>(group);
              const float scale = grid.scales[g];
              const auto zero = zero_point_of(scale, grid.biases[g], bits);
              ASSERT_TRUE(zero) << scale << " " << grid.biases[g];
              ASSERT_GT(scale, 0);
              ASSERT_LT(grid.codes[i], 1 << bits);
              const int step = grid.codes[i] - *zero;
              const float value = static_cast<float>(step) * scale;
              ASSERT_EQ(double{value}, double(step) * double{scale});
              ASSERT_EQ(std::fma(static_cast<float>(grid.codes[i]), scale, grid.biases[g]), value);
              // The nearest there is.
              for (const int other : {step - 1, step + 1}) {
                if (other + *zero < 0 || other + *zero >= 1 << bits) continue;
                ASSERT_LE(std::abs(double{w[i]} - double{value}),
                          std::abs(double{w[i]} - double(other) * double{scale}) * (1 + 1e-6));
              }
            }
            errors[method == AffineMethod::lsq] = error_of(w, grid, 256);
          }
          EXPECT_LE(errors[1], errors[0]) << bits << " " << group << " " << mean;
          // Where 0 is far from all numbers, there is little to choose.
          if (std::abs(mean) < 0.1f) {
            EXPECT_LT(errors[1], errors[0]) << bits << " " << group;
          }
        }
}

// Every zero point, and scales a thousandth apart.
TEST(ZeroPoints, LsqIsNearTheBestGridThereIs) {
  for (const int bits : {2, 3, 4}) {
    double ours = 0, best = 0;
    for (std::uint32_t seed = 0; seed < 12; ++seed) {
      const std::vector<float> w = noise(32, seed, seed % 3 == 0 ? 0.04f : 0.0f);
      ours += error_of(w, fitted({.bits = bits, .group = 32}, w, 32), 32);
      double least = std::numeric_limits<double>::infinity();
      for (int zero = 0; zero < 1 << bits; ++zero)
        least = std::min(least, least_error(w, bits, zero, 0.3, 0.005));
      best += least;
    }
    EXPECT_LT(ours, 1.06 * best) << bits;
  }
}

// The number of largest magnitude is at the end of the codes that is further from the zero point.
TEST(ZeroPoints, GivenByHand) {
  for (const float end : {-16.0f, 16.0f}) {
    std::vector<float> w(32, 0.0f);
    w[3] = end;
    w[7] = -end / 2;
    w[8] = -end * 7 / 8;
    w[9] = -end;  // beyond the last code
    const GridRows grid =
        fitted({.bits = 4, .group = 32, .method = AffineMethod::minmax, .zero = 8}, w, 32);
    EXPECT_EQ(grid.scales[0], end / -8);
    EXPECT_EQ(grid.biases[0], end);
    EXPECT_EQ(grid.codes[3], 0);
    EXPECT_EQ(grid.codes[7], 12);
    EXPECT_EQ(grid.codes[8], 15);
    EXPECT_EQ(grid.codes[9], 15);
    EXPECT_EQ(grid.codes[0], 8);
  }
}

// Against all scales of either sign, a thousandth apart.
TEST(ZeroPoints, GivenAreNearTheBestScaleThereIs) {
  for (const int bits : {2, 4, 5, 8}) {
    double ours = 0, least_sum = 0, plain = 0;
    const int zero = 1 << (bits - 1);
    for (std::uint32_t seed = 0; seed < 24; ++seed) {
      const std::vector<float> w = noise(32, seed, seed % 3 == 0 ? 0.02f : 0.0f);
      const ZeroPointFit how{.bits = bits, .group = 32, .params = DType::f16, .zero = zero};
      ZeroPointFit minmax = how;
      minmax.method = AffineMethod::minmax;
      const GridRows grid = fitted(how, w, 32);
      ASSERT_EQ(grid.scales[0], to_f32(to_f16(grid.scales[0])));
      ASSERT_EQ(grid.biases[0], grid.scales[0] * static_cast<float>(-zero));
      const double error = error_of(w, grid, 32), first = error_of(w, fitted(minmax, w, 32), 32);
      EXPECT_LE(error, first);
      ours += error;
      plain += first;
      least_sum += least_error(w, bits, zero, 0.3, 0.0005, true);
    }
    // Of 8 bits it tries only the two ends.
    EXPECT_LT(ours, (bits == 8 ? 1.12 : 1.06) * least_sum) << bits;
    EXPECT_LT(ours, plain) << bits;
  }
}

TEST(ZeroPoints, ImportanceWeighsColumns) {
  const std::vector<float> w = noise(8 * 64, 5);
  std::vector<float> importance(64, 1.0f);
  for (std::size_t c = 0; c < 64; c += 5) importance[c] = 50;
  const ZeroPointFit how{.bits = 2, .group = 32};
  const double weighed = error_of(w, fitted(how, w, 64, importance), 64, importance);
  EXPECT_LT(weighed, 0.9 * error_of(w, fitted(how, w, 64), 64, importance));
  // What is not > 0, or no number, counts as 0.
  std::vector<float> odd = importance, none = importance;
  odd[1] = -3;
  odd[2] = std::numeric_limits<float>::quiet_NaN();
  odd[3] = std::numeric_limits<float>::infinity();
  for (const std::size_t c : {1u, 2u, 3u}) none[c] = 0;
  EXPECT_EQ(fitted(how, w, 64, odd).scales, fitted(how, w, 64, none).scales);
}

TEST(ZeroPoints, DegenerateGroups) {
  std::vector<float> w(6 * 32);
  for (std::size_t i = 0; i < 32; ++i) {
    w[32 + i] = 0.25f;                                 // constant
    w[64 + i] = -0.25f;                                // and negative
    w[96 + i] = i == 3 ? 1e-30f : 0.0f;                // vanishes in f16
    w[128 + i] = (i % 2 == 0 ? 1.0f : -1.0f) * 8e37f;  // near the end of f32
    w[160 + i] = static_cast<float>(i) * 1e-42f;       // subnormal
  }
  for (const int bits : {2, 8})
    for (const DType params : {DType::f32, DType::bf16}) {
      for (const AffineMethod method : {AffineMethod::minmax, AffineMethod::lsq}) {
        const GridRows grid =
            fitted({.bits = bits, .group = 32, .params = params, .method = method}, w, 32);
        for (std::size_t g = 0; g < 6; ++g) {
          EXPECT_TRUE(std::isfinite(grid.scales[g]) && grid.scales[g] > 0) << g;
          EXPECT_TRUE(zero_point_of(grid.scales[g], grid.biases[g], bits)) << g;
        }
        ZeroPointFit given{.bits = bits, .group = 32, .params = params, .method = method};
        given.zero = 1 << (bits - 1);
        const GridRows symmetric = fitted(given, w, 32);
        for (std::size_t g = 0; g < 6; ++g) {
          EXPECT_TRUE(std::isfinite(symmetric.scales[g]) && symmetric.scales[g] != 0) << g;
          EXPECT_EQ(symmetric.biases[g], symmetric.scales[g] * static_cast<float>(-*given.zero));
        }
        EXPECT_EQ(grid.biases[1], 0);  // all positive: zero is the lowest code
        // All negative: the highest, or with a rounded scale the one below.
        EXPECT_GE(zero_point_of(grid.scales[2], grid.biases[2], bits).value_or(0), (1 << bits) - 2);
        for (std::size_t i = 0; i < 96; ++i) {
          const float value =
              static_cast<float>(grid.codes[i]) * grid.scales[i / 32] + grid.biases[i / 32];
          EXPECT_NEAR(value, w[i], 0.25f * 0x1p-7f) << i;
        }
      }
    }
  const GridRows half = fitted({.bits = 4, .group = 32, .params = DType::f16},
                               std::vector<float>(w.begin() + 96, w.begin() + 128), 32);
  EXPECT_EQ(half.scales[0], 1);
  EXPECT_EQ(half.biases[0], 0);
}

TEST(ZeroPoints, ScalesInF32HaveRoomForACode) {
  EXPECT_EQ(zero_point_scale(1 + 0x1p-23f, DType::f32, 4), 1);
  EXPECT_EQ(zero_point_scale(1 + 0x1p-20f, DType::f32, 4), 1);               // a tie, to even
  EXPECT_EQ(zero_point_scale(1 + 0x1.8p-19f, DType::f32, 4), 1 + 0x1p-18f);  // the next, up
  EXPECT_EQ(zero_point_scale(1 + 0x1p-19f, DType::f32, 4), 1 + 0x1p-19f);
  EXPECT_EQ(zero_point_scale(1 + 0x1p-9f, DType::bf16, 4), 1);
  EXPECT_EQ(zero_point_scale(0, DType::f32, 4), 0);
  EXPECT_TRUE(std::isfinite(zero_point_scale(std::numeric_limits<float>::max(), DType::f32, 8)));
  EXPECT_TRUE(std::isinf(zero_point_scale(1e6f, DType::f16, 4)));
  EXPECT_FALSE(std::signbit(zero_point_bias(2, 0, DType::f32)));
  EXPECT_EQ(zero_point_bias(1 + 0x1p-7f, 3, DType::f32), -3 * (1 + 0x1p-7f));
  EXPECT_EQ(zero_point_bias(1 + 0x1p-7f, 3, DType::bf16), to_f32(to_bf16(-3 * (1 + 0x1p-7f))));
}

}  // namespace
}  // namespace bittern
