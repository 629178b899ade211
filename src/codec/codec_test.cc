#include "bittern/codec.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "bittern/kv_cache.h"
#include "codec/special.h"
#include "ops/aura/aura.h"
#include "oracle/op_test.h"
#include "oracle/oracle.h"

namespace bittern {
namespace {

using oracle::expect_error;

// FNV-1a, 64 bit, over the bytes of the values.
std::uint64_t hash(const std::vector<float>& values) {
  std::uint64_t h = 0xcbf29ce484222325u;
  for (const float v : values) {
    std::uint32_t bits;
    std::memcpy(&bits, &v, 4);
    for (int byte = 0; byte < 4; ++byte) h = (h ^ (bits >> 8 * byte & 0xff)) * 0x100000001b3u;
  }
  return h;
}

// ---- functions ----

TEST(Codec, OwnFunctionsAgreeWithTheLibrary) {
  for (double x = -30; x <= 30; x += 0.37) {
    EXPECT_NEAR(codec::exp(x) / std::exp(x), 1, 1e-15) << x;
    EXPECT_NEAR(codec::log(std::exp(x)), x, 1e-15 * (1 + std::fabs(x))) << x;
  }
  const codec::Coordinate gaussian(0);
  for (double t = 0; t < 8; t += 0.13) {
    EXPECT_NEAR(gaussian.tail(t) / (std::erfc(t / std::sqrt(2.0)) / 2), 1, 1e-13) << t;
    if (t > 0) {
      EXPECT_NEAR(gaussian.quantile(gaussian.tail(t)), t, 1e-9) << t;
    }
  }
  // Uniform on [-sqrt 3, sqrt 3] for d = 3; an arc for d = 2; a parabola for d = 5.
  for (double x = 0; x < 1; x += 0.07) {
    EXPECT_NEAR(codec::Coordinate(3).tail(x * std::sqrt(3.0)), (1 - x) / 2, 1e-15);
    EXPECT_NEAR(codec::Coordinate(2).tail(x * std::sqrt(2.0)), std::acos(x) / M_PI, 1e-15);
    EXPECT_NEAR(codec::Coordinate(5).tail(x * std::sqrt(5.0)), 0.5 - 0.75 * x + 0.25 * x * x * x,
                1e-15);
  }
}

// Moments by a sum over the density, against the closed forms.
TEST(Codec, TailsAreTheIntegralsOfTheDensity) {
  for (const std::int64_t dim : {4, 7, 64, 1024}) {
    const codec::Coordinate law(dim);
    const int steps = 200000;
    const double from = 0.3, width = (law.end() - from) / steps;
    double mass = 0, moment = 0;
    for (int i = 0; i < steps; ++i) {
      const double t = from + (i + 0.5) * width;
      mass += law.density(t) * width;
      moment += t * law.density(t) * width;
    }
    EXPECT_NEAR(law.tail(from), mass, 1e-7) << dim;
    EXPECT_NEAR(law.tail_moment(from), moment, 1e-7) << dim;
    EXPECT_NEAR(law.tail(0), 0.5, 1e-14) << dim;
  }
}

// ---- codebooks ----

// The positive half times sqrt(dim), to all printed digits (and f32's half ulp).
void expect_levels(const Codebook& book, std::int64_t dim, const std::vector<double>& half) {
  ASSERT_EQ(book.levels.size(), 2 * half.size());
  for (std::size_t i = 0; i < half.size(); ++i) {
    const double level =
        static_cast<double>(book.levels[half.size() + i]) * std::sqrt(static_cast<double>(dim));
    EXPECT_NEAR(level, half[i], 0.51e-7 + half[i] * 0x1p-24) << dim << " " << i;
    EXPECT_EQ(book.levels[half.size() - 1 - i], -book.levels[half.size() + i]);
  }
}

TEST(Codec, SphereTablesToAllPrintedDigits) {
  const auto sphere = [](std::int64_t dim, std::vector<double> half) {
    const auto bits = static_cast<std::int32_t>(std::bit_width(half.size()));
    expect_levels(*sphere_codebook(dim, bits), dim, half);
  };
  sphere(64, {0.4521190, 1.4999748});
  sphere(64, {0.2437534, 0.7506581, 1.3293429, 2.1113114});
  sphere(64,
         {0.1273522, 0.3847183, 0.6504941, 0.9318940, 1.2394042, 1.5908491, 2.0233098, 2.6463705});
  sphere(128, {0.4524533, 1.5051930});
  sphere(128, {0.2444249, 0.7533302, 1.3365989, 2.1314708});
  sphere(128,
         {0.1278732, 0.3863809, 0.6536189, 0.9370970, 1.2477705, 1.6043427, 2.0459254, 2.6888593});
  sphere(256, {0.4526176, 1.5078045});
  sphere(256, {0.2447598, 0.7546674, 1.3402473, 2.1416686});
  sphere(256,
         {0.1281340, 0.3872140, 0.6551872, 0.9397137, 1.2519890, 1.6111681, 2.0574112, 2.7105670});
  // Exactly: d = 3 is uniform, d = 2 at one bit the mean of a quarter circle's cosine.
  sphere(3, {std::sqrt(3.0) / 4, std::sqrt(3.0) * 3 / 4});
  sphere(2, {2 / M_PI * std::sqrt(2.0)});
}

TEST(Codec, BoundariesOf128LieHalfWay) {
  const Codebook book = *sphere_codebook(128, 4);
  const double above[] = {0.2571270, 0.5199999, 0.7953580, 1.0924337,
                          1.4260566, 1.8251340, 2.3673923};
  EXPECT_EQ(book.boundaries[7], 0);
  for (std::size_t i = 0; i < 7; ++i) {
    EXPECT_NEAR(static_cast<double>(book.boundaries[8 + i]) * std::sqrt(128.0), above[i], 2e-7);
    EXPECT_EQ(book.boundaries[6 - i], -book.boundaries[8 + i]);
  }
}

TEST(Codec, GaussianTablesToAllPrintedDigits) {
  const auto gaussian = [](std::vector<double> half) {
    const auto bits = static_cast<std::int32_t>(std::bit_width(half.size()));
    expect_levels(*gaussian_codebook(256, bits), 256, half);
  };
  gaussian({0.7978846});
  gaussian({0.4527800, 1.5104176});
  gaussian({0.2450942, 0.7560053, 1.3439093, 2.1519457});
  gaussian(
      {0.1283950, 0.3880483, 0.6567591, 0.9423405, 1.2562312, 1.6180464, 2.0690172, 2.7325896});
  gaussian({0.0658897, 0.1980518, 0.3313783, 0.4666995, 0.6049336, 0.7471357, 0.8945651, 1.0487833,
            1.2118044, 1.3863403, 1.5762281, 1.7872332, 2.0287284, 2.3177394, 2.6911196,
            3.2607325});
  EXPECT_NEAR(16 * gaussian_codebook(256, 6)->levels.back(), 3.7441013, 5e-7);
  EXPECT_NEAR(16 * gaussian_codebook(256, 7)->levels.back(), 4.1896942, 5e-7);
  EXPECT_NEAR(16 * gaussian_codebook(256, 8)->levels.back(), 4.6035, 5e-5);
}

TEST(Codec, DistortionsToAllPrintedDigits) {
  struct Row {
    double gaussian, d64, d128, d256, unit;
  };
  const Row rows[] = {{0.363380, 0.358387, 0.360889, 0.362136, 1e-6},
                      {0.117482, 0.114526, 0.116000, 0.116740, 1e-6},
                      {0.034548, 0.033391, 0.033966, 0.034256, 1e-6},
                      {0.009501, 0.009132, 0.009315, 0.009408, 1e-6},
                      {0.002505, 0.002399, 0.002451, 0.002478, 1e-6},
                      {6.442e-4, 6.160e-4, 6.300e-4, 6.371e-4, 1e-7},
                      {1.635e-4, 1.561e-4, 1.598e-4, 1.616e-4, 1e-7},
                      {4.118e-5, 3.932e-5, 4.024e-5, 4.071e-5, 1e-8}};
  for (std::int32_t bits = 1; bits <= 8; ++bits) {
    const Row& row = rows[bits - 1];
    EXPECT_NEAR(gaussian_codebook(64, bits)->distortion, row.gaussian, 0.51 * row.unit) << bits;
    EXPECT_NEAR(sphere_codebook(64, bits)->distortion, row.d64, 0.51 * row.unit) << bits;
    EXPECT_NEAR(sphere_codebook(128, bits)->distortion, row.d128, 0.51 * row.unit) << bits;
    EXPECT_NEAR(sphere_codebook(256, bits)->distortion, row.d256, 0.51 * row.unit) << bits;
  }
}

// Every length and width: levels ascend inside the ball, nothing moves under another Lloyd step,
// and the distortion is that of the table as rounded.
TEST(Codec, EveryTableIsAFixedPoint) {
  for (std::int64_t dim = 2; dim <= 1024; dim += dim < 20 ? 1 : 61) {
    const codec::Coordinate law(dim);
    for (std::int32_t bits = 1; bits <= 8; ++bits) {
      const Codebook book = *sphere_codebook(dim, bits);
      const std::size_t n = book.levels.size();
      for (std::size_t i = n / 2; i < n; ++i) {
        ASSERT_GT(book.levels[i], book.levels[i - 1]) << dim << " " << bits;
        ASSERT_LT(book.levels[i], 1) << dim << " " << bits;
        const double low = law.end() * static_cast<double>(book.boundaries[i - 1]);
        const double high =
            i + 1 == n ? law.end() : law.end() * static_cast<double>(book.boundaries[i]);
        const double mass = law.tail(low) - law.tail(high);
        const double mean = (law.tail_moment(low) - law.tail_moment(high)) / mass;
        ASSERT_NEAR(law.end() * static_cast<double>(book.levels[i]), mean, 1e-6)
            << dim << " " << bits << " " << i;
      }
      const double distortion = *sphere_distortion(dim, book.levels, book.boundaries);
      EXPECT_NEAR(distortion / book.distortion, 1, 1e-7) << dim << " " << bits;
    }
  }
}

// The tables that AURA ships. Its 4-bit levels are the means of equally likely bins; its 8-bit
// ones are 100 k-means sweeps over a grid, from quantiles: both far from the optimum.
TEST(Codec, ShippedTablesAreTwiceAndFourTimesWorse) {
  const std::vector<double> shipped = {0.006938, 0.020989, 0.035597, 0.051262,
                                       0.068756, 0.089527, 0.117195, 0.173926};
  std::vector<float> levels;
  for (std::size_t i = 8; i-- > 0;) levels.push_back(static_cast<float>(-shipped[i]));
  for (const double v : shipped) levels.push_back(static_cast<float>(v));
  const double four = *sphere_distortion(128, levels, *midpoints(levels));
  EXPECT_NEAR(four, 0.019458, 1e-5);
  EXPECT_NEAR(four / sphere_codebook(128, 4)->distortion, 2.1, 0.05);

  constexpr int kGrid = 32768, kLevels = 256;
  std::vector<double> x(kGrid), weight(kGrid), centre(kLevels);
  double total = 0;
  for (int i = 0; i < kGrid; ++i) {
    x[static_cast<std::size_t>(i)] = -1 + 2.0 * i / (kGrid - 1);
    const double at = x[static_cast<std::size_t>(i)];
    total += weight[static_cast<std::size_t>(i)] = std::pow(1 - at * at, 125.0 / 2);
  }
  double passed = 0;
  for (int i = 0, level = 0; i < kGrid && level < kLevels; ++i) {
    passed += weight[static_cast<std::size_t>(i)];
    while (level < kLevels && passed >= (level + 0.5) / kLevels * total)
      centre[static_cast<std::size_t>(level++)] = x[static_cast<std::size_t>(i)];
  }
  for (int sweep = 0; sweep < 100; ++sweep) {
    std::vector<double> sum(kLevels), mass(kLevels);
    std::size_t nearest = 0;
    for (std::size_t i = 0; i < kGrid; ++i) {
      while (nearest + 1 < kLevels && x[i] > (centre[nearest] + centre[nearest + 1]) / 2) ++nearest;
      sum[nearest] += weight[i] * x[i];
      mass[nearest] += weight[i];
    }
    for (std::size_t k = 0; k < kLevels; ++k)
      if (mass[k] > 0) centre[k] = sum[k] / mass[k];
  }
  const std::vector<float> eight(centre.begin(), centre.end());
  EXPECT_NEAR(eight.back(), 0.321782, 2e-3);
  const double ratio =
      *sphere_distortion(128, eight, *midpoints(eight)) / sphere_codebook(128, 8)->distortion;
  EXPECT_NEAR(ratio, 3.9, 0.1);
}

TEST(Codec, UserTablesAreChecked) {
  const std::vector<float> levels = {-1, 0, 0.5f, 2};
  const auto book = user_codebook(levels);
  ASSERT_TRUE(book.ok());
  EXPECT_EQ(book->levels, levels);
  EXPECT_EQ(book->boundaries, (std::vector<float>{-0.5f, 0.25f, 1.25f}));
  EXPECT_TRUE(std::isnan(book->distortion));
  const auto status = [](std::vector<float> v) { return user_codebook(v).status(); };
  const Code bad = Code::invalid_argument;
  expect_error(status({1, 2, 3}), bad,
               "user_codebook: levels: 3 of them, expected 2, 4, 8, ... 256");
  expect_error(status({1}), bad, "user_codebook: levels: 1 of them, expected 2, 4, 8, ... 256");
  expect_error(status({0, 1, 1, 2}), bad,
               "user_codebook: levels: [2] is not greater than the level before it, expected "
               "ascending values");
  expect_error(status({0, INFINITY}), bad,
               "user_codebook: levels: [1] is inf, expected a finite value");
  expect_error(status({NAN, 1}), bad, "user_codebook: levels: [0] is nan, expected a finite value");
  // Midpoints of the largest values do not overflow.
  EXPECT_EQ(midpoints(std::vector<float>{3e38f, 3.4e38f})->at(0), 3.2e38f);
}

TEST(Codec, ErrorsNameWhatIsWrong) {
  const Code bad = Code::invalid_argument;
  expect_error(sphere_codebook(1, 4).status(), bad, "sphere_codebook: dim: 1, expected 2..1024");
  expect_error(sphere_codebook(1025, 4).status(), bad,
               "sphere_codebook: dim: 1025, expected 2..1024");
  expect_error(sphere_codebook(64, 0).status(), bad, "sphere_codebook: bits: 0, expected 1..8");
  expect_error(gaussian_codebook(64, 9).status(), bad, "gaussian_codebook: bits: 9, expected 1..8");
  expect_error(make_rotation(Rotation::hadamard, 100, 1).status(), bad,
               "make_rotation: dim: 100 with rotation hadamard, expected a power of two times one "
               "of 1 12 20 28 36 44 60");
  const std::vector<float> levels = {0, 1}, none, descending = {1, 0, 2};
  expect_error(sphere_distortion(64, levels, none).status(), bad,
               "sphere_distortion: boundaries: 0 of them, expected one less than levels, 2");
  expect_error(sphere_distortion(64, std::vector<float>{0, 1, 2, 3}, descending).status(), bad,
               "sphere_distortion: boundaries: [1] is 0, expected no less than the value before "
               "it");
}

// ---- rotations ----

TEST(Codec, HadamardFactorsAreHadamardMatrices) {
  for (const std::int64_t m : kHadamardFactors) {
    const float* h = hadamard_matrix(m);
    for (std::int64_t i = 0; i < m; ++i) {
      for (std::int64_t j = 0; j < m; ++j) {
        double sum = 0;
        for (std::int64_t k = 0; k < m; ++k)
          sum += static_cast<double>(h[i * m + k]) * static_cast<double>(h[j * m + k]);
        ASSERT_EQ(sum, i == j ? static_cast<double>(m) : 0) << m;
        ASSERT_EQ(std::fabs(h[i * m + j]), 1) << m;
      }
    }
  }
  EXPECT_EQ(hadamard_factor(128), 1);
  EXPECT_EQ(hadamard_factor(80), 20);
  EXPECT_EQ(hadamard_factor(96), 12);
  EXPECT_EQ(hadamard_factor(112), 28);
  EXPECT_EQ(hadamard_factor(576), 36);
  EXPECT_EQ(hadamard_factor(6), 0);
  EXPECT_EQ(hadamard_factor(0), 0);
}

// The recipe, step by step, for seed 0: state = mix(G) | 1.
TEST(Codec, SignsFollowTheDocumentedRecipe) {
  std::uint64_t state = 0xE220A8397B1DCDAFu;  // SplitMix64's first output for seed 0
  const auto signs = *make_rotation(Rotation::hadamard, 64, 0);
  for (const float sign : signs) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    EXPECT_EQ(sign, (state & 1) != 0 ? 1.0f : -1.0f);
  }
  EXPECT_NE(*make_rotation(Rotation::hadamard, 64, 1), signs);
  // A shorter table is the beginning of a longer one.
  const auto longer = *make_rotation(Rotation::hadamard, 128, 0);
  EXPECT_TRUE(std::equal(signs.begin(), signs.end(), longer.begin()));
}

TEST(Codec, DenseRotationsAreOrthogonalAndLookRandom) {
  for (const std::int64_t dim : {2, 3, 64, 129}) {
    const auto p = *make_rotation(Rotation::dense, dim, 42);
    double fourth = 0;
    for (std::int64_t i = 0; i < dim; ++i) {
      for (std::int64_t j = 0; j < dim; ++j) {
        double sum = 0;
        for (std::int64_t k = 0; k < dim; ++k)
          sum += static_cast<double>(p[static_cast<std::size_t>(i * dim + k)]) *
                 static_cast<double>(p[static_cast<std::size_t>(j * dim + k)]);
        ASSERT_NEAR(sum, i == j ? 1 : 0, 1e-6) << dim;
        fourth += std::pow(static_cast<double>(p[static_cast<std::size_t>(i * dim + j)]), 4);
      }
    }
    // E x^4 = 3 / (d (d + 2)) of a coordinate on the sphere.
    const auto d = static_cast<double>(dim);
    if (dim > 60) {
      EXPECT_NEAR(fourth / (d * d) * d * (d + 2) / 3, 1, 0.05) << dim;
    }
  }
  EXPECT_TRUE(make_rotation(Rotation::identity, 64, 1)->empty());
}

// ---- the same bytes everywhere ----

TEST(Codec, TablesHavePinnedHashes) {
  struct Table {
    std::int64_t dim;
    std::int32_t bits;
    std::uint64_t levels, boundaries;
  };
  const Table tables[] = {{2, 3, 0xbc48b610896f9f2du, 0xc0b6f988645f42fdu},
                          {3, 8, 0x32c0e601ecb3af15u, 0x28ad08522ae5f415u},
                          {64, 1, 0x7aebf895c3eab3a5u, 0x4d25767f9dce13f5u},
                          {64, 4, 0xc92fb40b60e17dc1u, 0x7bb8f1070a90f939u},
                          {80, 4, 0x2c4deb91b25404c5u, 0xdd55db1fd3964ce5u},
                          {96, 3, 0x2b9c8258ba28d69du, 0xcf4a037c73565729u},
                          {128, 1, 0x12587ddf5b668395u, 0x4d25767f9dce13f5u},
                          {128, 2, 0xa37c605fe8acd601u, 0xb93e7a2b0d876a1u},
                          {128, 3, 0x3856db110855e225u, 0x647b27da43dbe461u},
                          {128, 4, 0x887d503df05a0a89u, 0xb73b7ae5e47724a9u},
                          {128, 5, 0x195cdc3f74a3ef15u, 0xfdf56ea15f06b779u},
                          {128, 6, 0x5b7ea741fcaef759u, 0x789f0f010e95b965u},
                          {128, 7, 0x124978ffd6fe2e8du, 0xfa910bad05646d51u},
                          {128, 8, 0x9a00b40619a1e34du, 0xde57abcd542af651u},
                          {192, 4, 0xb6d8d2c393896f85u, 0xfa3722136f17abd1u},
                          {256, 4, 0x43bac576b252541du, 0x290f3a2b28da583du},
                          {256, 8, 0xa3cdb57acf75b851u, 0x5b6ff9ba13516501u},
                          {512, 2, 0x96db1acb9d7f98a9u, 0x242de6542f2bea55u},
                          {1000, 6, 0x865a324424644f09u, 0xc087799de380c81u},
                          {1024, 8, 0xf853d9ff318e47e1u, 0x725a7e4390ac3cf9u}};
  for (const Table& t : tables) {
    const Codebook book = *sphere_codebook(t.dim, t.bits);
    EXPECT_EQ(hash(book.levels), t.levels) << t.dim << " " << t.bits;
    EXPECT_EQ(hash(book.boundaries), t.boundaries) << t.dim << " " << t.bits;
  }
  const std::uint64_t gaussian[] = {0x92249f429f252e49u, 0xc6146e1b663aafb5u, 0x69250e6b5db2ac05u,
                                    0x77e3f3f324e88ef5u, 0x51866acd71b745f5u, 0x63998f389bfa82c1u,
                                    0x9ac223edb30f415u,  0xdb4b161e58b9635u};
  for (std::int32_t bits = 1; bits <= 8; ++bits)
    EXPECT_EQ(hash(gaussian_codebook(128, bits)->levels), gaussian[bits - 1]) << bits;
}

TEST(Codec, RotationsHavePinnedHashes) {
  struct Table {
    Rotation rotation;
    std::int64_t dim;
    std::uint64_t seed, hash;
  };
  constexpr Rotation kHadamard = Rotation::hadamard, kDense = Rotation::dense;
  const Table tables[] = {{kHadamard, 64, 0x0u, 0xc66ef0d4fcfe7725u},
                          {kHadamard, 128, 0x0u, 0x12bae55fabc46c25u},
                          {kHadamard, 128, 0x2au, 0xb31545829b39bb25u},
                          {kHadamard, 80, 0x7u, 0x7fc95cd6f01af5a5u},
                          {kHadamard, 1024, 0xffffffffffffffffu, 0x6653324b9ab68ea5u},
                          {kDense, 2, 0x0u, 0x76abe971ac43510du},
                          {kDense, 64, 0x2au, 0xdf3f71eac4d78de0u},
                          {kDense, 80, 0x1u, 0xd2b4aa03dc31f9e7u},
                          {kDense, 128, 0x2au, 0x4fbd8368c69abeaau},
                          {kDense, 128, 0x2bu, 0x7eb4ed871c256f62u},
                          {kDense, 257, 0x9u, 0x5ee2aae6472e6abdu}};
  for (const Table& t : tables)
    EXPECT_EQ(hash(*make_rotation(t.rotation, t.dim, t.seed)), t.hash) << t.dim << " " << t.seed;
  std::uint64_t factors = 0;
  for (const std::int64_t m : kHadamardFactors)
    factors = factors * 31 + hash({hadamard_matrix(m), hadamard_matrix(m) + m * m});
  EXPECT_EQ(factors, 0xafb9f5b35873d778u);
}

TEST(Codec, TablesDoNotDependOnTheCallersFloatModes) {
  const auto tables = [] {
    std::vector<std::uint64_t> hashes;
    for (const std::int32_t bits : {1, 4, 8}) {
      hashes.push_back(hash(sphere_codebook(96, bits)->levels));
      hashes.push_back(hash(gaussian_codebook(96, bits)->boundaries));
    }
    hashes.push_back(hash(*make_rotation(Rotation::dense, 40, 7)));
    hashes.push_back(hash(legacy_codebook(96, 8)->levels));
    hashes.push_back(hash(*midpoints(std::vector<float>{0x1p-149f, 0x1p-148f, 1.0f, 1.5f, 1e38f})));
    return hashes;
  };
  const auto expected = tables();
  const unsigned before = __builtin_ia32_stmxcsr();
  for (const unsigned mode : {0x1f80u | 0x8040u, 0x1f80u | 0x4000u, 0x1f80u | 0x6000u}) {
    __builtin_ia32_ldmxcsr(mode);
    const auto got = tables();
    const unsigned after = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(before);
    EXPECT_EQ(got, expected) << mode;
    EXPECT_EQ(after & 0xffc0u, mode);
  }
}

}  // namespace
}  // namespace bittern
