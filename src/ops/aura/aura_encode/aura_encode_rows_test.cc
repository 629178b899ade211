// Rows of any size: zeros, the least and the largest there are, and what is not finite.
#include <bit>

#include "ops/aura/aura_encode/aura_encode_test.h"

namespace bittern {
namespace {

using namespace aura_encode_test;

// f(desc, tables, kernel) for each rotation, rule and kernel, with rows of 128 and of 20.
template <class F>
void for_all(F&& f) {
  for (const std::int64_t dim : {128, 20}) {
    for (const Rotation rotation : kAllRotations) {
      AuraDesc d{.dim = dim, .rotation = rotation};
      const Tables t(d);
      for (const ScaleRule rule : kAllRules) {
        d.scale_rule = rule;
        for (const auto kernel : kBothKernels) f(d, t, kernel);
      }
    }
  }
}

TEST(AuraEncode, ZeroRowsDecodeToZeros) {
  for_all([](AuraDesc& d, const Tables& t, std::string_view kernel) {
    std::vector<float> x(static_cast<std::size_t>(2 * d.dim));
    x[1] = -0.0f;
    const Encoded e = encode(d, x, t, kernel);
    EXPECT_EQ(e.scales, (std::vector<float>{0, 0}));
    for (std::int64_t j = 0; j < d.dim; ++j)
      EXPECT_EQ(e.code(d, 1, j), 7u);  // just below the middle: 0 > 0 is false
    for (const float y : decode(d, e, t)) EXPECT_EQ(y, 0);
  });
}

TEST(AuraEncode, RowsOfAnySizeKeepTheirCodes) {
  for_all([](AuraDesc& d, const Tables& t, std::string_view kernel) {
    for (const DType element : {DType::f32, DType::bf16, DType::f16}) {
      d.element = element;
      const bool half = element == DType::f16;
      const int least = half ? -18 : element == DType::bf16 ? -127 : kLeastPower;
      const int most = half ? 14 : kMostPower;
      const auto x = rows_of_all_sizes(d.dim, least, most);
      Encoded e;
      expect_ok(visit<float, f16, bf16>(element, [&]<class X>(Type<X>) {
        e = encode(d, stored<X>(x), t, kernel);
        return Status();
      }));
      const auto words = static_cast<std::size_t>(d.packed_shape()[1]);
      constexpr double kMost = 3.4028234663852886e38;
      AuraDesc plain = d;
      plain.element = DType::f32;
      const auto y = decode(plain, e, t);
      const auto n = static_cast<std::size_t>(d.dim);
      double first = 0, length = 0;
      for (std::size_t j = 0; j < n; ++j) length = std::hypot(length, static_cast<double>(x[j]));
      for (std::size_t row = 0; row < e.scales.size(); ++row) {
        const int power = row == 0 ? 0 : static_cast<int>(row) - 1 + least;
        for (std::size_t w = 0; w < words; ++w)
          ASSERT_EQ(e.packed[row * words + w], e.packed[w]) << power;
        const double s = std::ldexp(static_cast<double>(e.scales[0]), power);
        const double norm = std::ldexp(length, power);
        const bool saturates = norm > kMost || s > kMost;
        if (!saturates) {
          EXPECT_LE(std::fabs(static_cast<double>(e.scales[row]) - s), s < 0x1p-125 ? 0x1p-148 : 0)
              << power;
        }
        double error = 0;
        for (std::size_t j = 0; j < n; ++j)
          error = std::hypot(
              error, static_cast<double>(x[row * n + j]) - static_cast<double>(y[row * n + j]));
        error /= norm;
        if (row == 0) first = error;
        // Subnormal numbers have fewer bits, in s and in y.
        const double granularity = 0x1p-148 * std::sqrt(static_cast<double>(n)) / norm;
        if (!saturates) {
          EXPECT_NEAR(error, first, 1e-5 + granularity) << power;
        }
      }
    }
    d.element = DType::f32;
  });
}

// The same at every width, and rows whose elements are of all sizes: the largest decides.
TEST(AuraEncode, RowsOfAnySizeAtEveryWidth) {
  for (const auto kernel : kBothKernels) {
    for (const Rotation rotation : kAllRotations) {
      for (std::int32_t bits = 1; bits <= 8; ++bits) {
        for (const std::int64_t dim : {2, 33, 64, 80}) {
          if (rotation == Rotation::hadamard && hadamard_factor(dim) == 0) continue;
          AuraDesc d{.dim = dim, .bits = bits, .rotation = rotation};
          const Tables t(d);
          const auto n = static_cast<std::size_t>(dim);
          const auto x = rows_of_all_sizes(dim, kLeastPower, kMostPower);
          const Encoded e = encode(d, x, t, kernel);
          const auto words = static_cast<std::size_t>(d.packed_shape()[1]);
          for (std::size_t w = words; w < e.packed.size(); ++w)
            ASSERT_EQ(e.packed[w], e.packed[w % words]) << dim << " " << bits << " " << w / words;
          // One element is the row, however small the others are beside it.
          std::vector<float> one(n, 1e-30f), same(n);
          one[1] = same[1] = 3e20f;
          const Encoded with = encode(d, one, t, kernel), without = encode(d, same, t, kernel);
          if (rotation != Rotation::identity) {
            EXPECT_EQ(with.packed, without.packed);
          }
          EXPECT_EQ(with.scales, without.scales);
        }
      }
    }
  }
}

// A single element, down to the least there is.
TEST(AuraEncode, TheLeastRowHasADirection) {
  for_all([](AuraDesc& d, const Tables& t, std::string_view kernel) {
    std::vector<float> x(static_cast<std::size_t>(d.dim));
    x[2] = 1;
    const Encoded want = encode(d, x, t, kernel);
    for (const float v :
         {0x1p-149f, 0x1.8p-148f, 0x1p-126f, 9e-9f, 1e-8f, 1.85e19f, 7.9e20f, 0x1.fffffep127f}) {
      x[2] = v;
      const Encoded e = encode(d, x, t, kernel);
      EXPECT_EQ(e.packed, want.packed) << v;
      const double s = std::min(static_cast<double>(want.scales[0]) * static_cast<double>(v),
                                3.4028234663852886e38);
      EXPECT_NEAR(e.scales[0], s, 1e-6 * s + 0x1p-149) << v;
    }
  });
}

TEST(AuraEncode, RowsWhoseNormOverflowsKeepTheirCodes) {
  for_all([](AuraDesc& d, const Tables& t, std::string_view kernel) {
    Gaussians gaussians(5);
    auto x = gaussians.rows(1, d.dim);
    double length = 0;
    for (float& v : x) {
      v = std::clamp(v, -3.0f, 3.0f);
      length += static_cast<double>(v) * static_cast<double>(v);
    }
    length = std::sqrt(length);
    const Encoded want = encode(d, x, t, kernel);
    constexpr double kMost = 3.4028234663852886e38;
    for (const float size : {0x1p62f, 0x1p65f, 0x1p70f, 0x1p120f, 0x1p126f}) {
      auto large = x;
      for (float& v : large) v *= size;
      const Encoded e = encode(d, large, t, kernel);
      EXPECT_EQ(e.packed, want.packed);
      const double norm = std::min(length * static_cast<double>(size), kMost);
      const double s = norm * static_cast<double>(want.scales[0]) / length;
      EXPECT_NEAR(e.scales[0] / std::min(s, kMost), 1, 1e-6) << size;
      for (const float y : decode(d, e, t)) EXPECT_TRUE(std::isfinite(y));
    }
  });
}

TEST(AuraEncode, RowsThatAreNotFiniteDecodeToNan) {
  for_all([](AuraDesc& d, const Tables& t, std::string_view kernel) {
    for (const float bad : {NAN, INFINITY, -INFINITY}) {
      std::vector<float> x(static_cast<std::size_t>(d.dim), 1.0f);
      x[static_cast<std::size_t>(d.dim - 2)] = bad;
      const Encoded e = encode(d, x, t, kernel);
      for (const std::uint32_t word : e.packed) EXPECT_EQ(word, 0u);
      EXPECT_TRUE(std::isnan(e.scales[0]));
      for (const float y : decode(d, e, t)) EXPECT_TRUE(std::isnan(y));
    }
  });
}

TEST(AuraEncode, NoRowDisturbsAnother) {
  for_all([](AuraDesc& d, const Tables& t, std::string_view kernel) {
    Gaussians gaussians(6);
    const auto n = static_cast<std::size_t>(d.dim);
    auto x = gaussians.rows(40, d.dim);
    const Encoded clean = encode(d, x, t, kernel);
    const float bad[] = {NAN, INFINITY, 3e38f, 1e-30f, 0};
    for (std::size_t row = 0; row < 40; row += 3)
      for (std::size_t j = 0; j < n; ++j) x[row * n + j] = bad[row % 5];
    const Encoded dirty = encode(d, x, t, kernel);
    const auto words = static_cast<std::size_t>(d.packed_shape()[1]);
    for (std::size_t row = 0; row < 40; ++row) {
      if (row % 3 == 0) continue;
      EXPECT_EQ(clean.scales[row], dirty.scales[row]);
      for (std::size_t w = row * words; w < (row + 1) * words; ++w)
        EXPECT_EQ(clean.packed[w], dirty.packed[w]);
    }
  });
}

TEST(AuraEncode, HalfNormsSaturate) {
  for_all([](AuraDesc& d, const Tables& t, std::string_view kernel) {
    Gaussians gaussians(7);
    auto x = gaussians.rows(3, d.dim);
    for (std::size_t j = 0; j < static_cast<std::size_t>(d.dim); ++j) {
      x[j] *= 1e6f;
      x[static_cast<std::size_t>(2 * d.dim) + j] = 1;
    }
    x.back() = NAN;
    const Encoded full = encode(d, x, t, kernel);
    d.f16_scale = true;
    const Encoded half = encode(d, x, t, kernel);
    d.f16_scale = false;
    EXPECT_EQ(half.packed, full.packed);
    EXPECT_EQ(half.scales[0], 65504);
    EXPECT_EQ(half.scales[1], to_f32(to_f16(full.scales[1])));
    EXPECT_TRUE(std::isnan(half.scales[2]));
  });
}

}  // namespace
}  // namespace bittern
