#include "ops/aura/aura_encode/aura_encode_test.h"

#include <bit>

namespace bittern {
namespace {

using namespace aura_encode_test;

TEST(AuraEncode, MatchesRefEverywhere) { oracle::expect_parity("aura_encode"); }

// ---- quality ----

// Random directions: the codec's error is what the codebook promises. (1 % is many standard errors
// of so many rows.)
TEST(AuraEncode, DistortionIsThatOfTheCodebook) {
  Gaussians gaussians(1);
  for (const std::int64_t dim : {64, 128, 256}) {
    const auto x = gaussians.rows(100000, dim);
    for (std::int32_t bits = 1; bits <= 8; ++bits) {
      const AuraDesc d{.dim = dim, .bits = bits, .scale_rule = ScaleRule::none};
      const Tables t(d);
      EXPECT_NEAR(round_trip_error(d, x, t) / t.book.distortion, 1, 0.01) << dim << " " << bits;
    }
  }
}

TEST(AuraEncode, EachScaleRuleDoesWhatItSays) {
  Gaussians gaussians(2);
  const auto x = gaussians.rows(20000, 128);
  constexpr ScaleRule kRules[] = {ScaleRule::none, ScaleRule::matched, ScaleRule::least_squares,
                                  ScaleRule::unbiased};
  struct Row {
    std::int32_t bits;
    double error[4];
  };
  for (const Row& row :
       {Row{2, {.11607, .11891, .11530, .13067}}, Row{3, {.03396, .03380, .03351, .03471}},
        Row{4, {.00929, .00915, .00913, .00922}}}) {
    for (std::size_t i = 0; i < 4; ++i) {
      const AuraDesc d{.dim = 128, .bits = row.bits, .scale_rule = kRules[i]};
      EXPECT_NEAR(round_trip_error(d, x, Tables(d)) / row.error[i], 1, 0.01)
          << row.bits << " bits, rule " << i;
    }
  }
  // Lengths, projections and least squares, row by row.
  const std::vector<float> few(x.begin(), x.begin() + 64 * 128);
  double error[4][64];
  for (std::size_t rule = 0; rule < 4; ++rule) {
    AuraDesc d{.dim = 128, .bits = 2, .scale_rule = kRules[rule]};
    const Tables t(d);
    const auto y = decode(d, encode(d, few, t), t);
    for (std::size_t i = 0; i < 64; ++i) {
      double xx = 0, xy = 0, yy = 0;
      for (std::size_t j = i * 128; j < (i + 1) * 128; ++j) {
        const auto a = static_cast<double>(few[j]), b = static_cast<double>(y[j]);
        xx += a * a, xy += a * b, yy += b * b;
      }
      error[rule][i] = xx - 2 * xy + yy;
      if (kRules[rule] == ScaleRule::matched) {
        EXPECT_NEAR(yy / xx, 1, 1e-5);
      }
      if (kRules[rule] == ScaleRule::unbiased) {
        EXPECT_NEAR(xy / xx, 1, 1e-5);
      }
    }
  }
  for (std::size_t i = 0; i < 64; ++i)
    for (const std::size_t other : {0u, 1u, 3u}) EXPECT_LE(error[2][i], error[other][i] * 1.00001);
}

// Rows that are not random, relative error at 4 bits: the reason for a rotation, and for its signs.
TEST(AuraEncode, RotationsTameAwkwardRows) {
  const auto error = [](Rotation rotation, const std::vector<float>& x, bool signs = true) {
    const AuraDesc d{.dim = 128, .rotation = rotation};
    double sum = 0;
    for (std::uint64_t seed = 1; seed <= 16; ++seed) {
      Tables t(d, seed);
      if (!signs) t.rotation.assign(128, 1.0f);
      sum += round_trip_error(d, x, t) / 16;
    }
    return sum;
  };
  const std::vector<float> constant(128, 3.0f);
  EXPECT_LT(error(Rotation::identity, constant), 1e-10);
  EXPECT_NEAR(error(Rotation::hadamard, constant, false), 0.237, 0.005);
  EXPECT_LT(error(Rotation::hadamard, constant), 0.0092);
  EXPECT_NEAR(error(Rotation::dense, constant), 0.0092, 0.001);
  std::vector<float> one_hot(128);
  one_hot[77] = -2;
  EXPECT_NEAR(error(Rotation::identity, one_hot), 0.237, 0.005);
  EXPECT_LT(error(Rotation::hadamard, one_hot), 1e-10);
  EXPECT_NEAR(error(Rotation::dense, one_hot), 0.0093, 0.001);
  Gaussians gaussians(3);
  auto outliers = gaussians.rows(200, 128);
  for (std::size_t i = 0; i < outliers.size(); i += 128)
    for (const std::size_t j : {3u, 40u, 41u, 99u}) outliers[i + j] *= 30;
  EXPECT_NEAR(error(Rotation::identity, outliers), 0.209, 0.01);
  EXPECT_NEAR(error(Rotation::hadamard, outliers), 0.0080, 0.0008);
  EXPECT_NEAR(error(Rotation::dense, outliers), 0.0095, 0.0008);
}

// ---- AURA's contract ----

// Its pipeline in f64, against dense rotations and a uniform codebook; a code may differ only where
// the rotated value all but touches a boundary.
TEST(AuraEncode, AgreesWithTheSeedsOracle) {
  Gaussians gaussians(4);
  for (const auto kernel : kBothKernels) {
    for (const std::int64_t dim : {32, 64, 80, 96, 128, 192, 256}) {
      for (const std::int32_t bits : {2, 3, 4, 6, 8}) {
        AuraDesc d{.dim = dim, .bits = bits, .rotation = Rotation::dense};
        Tables t(d);
        if (bits == 4) {
          for (int i = 0; i < 16; ++i)
            t.book.levels[static_cast<std::size_t>(i)] = (2.0f * static_cast<float>(i) - 15) / 15;
          t.book = *user_codebook(t.book.levels);
        }
        const auto x = gaussians.rows(3, dim);
        const Encoded e = encode(d, x, t, kernel);
        for (std::int64_t row = 0; row < 3; ++row) {
          const float* at = x.data() + row * dim;
          double norm = 0, recon = 0;
          for (std::int64_t j = 0; j < dim; ++j)
            norm += static_cast<double>(at[j]) * static_cast<double>(at[j]);
          norm = std::sqrt(norm);
          for (std::int64_t i = 0; i < dim; ++i) {
            double rotated = 0;
            for (std::int64_t j = 0; j < dim; ++j)
              rotated += static_cast<double>(t.rotation[static_cast<std::size_t>(i * dim + j)]) *
                         static_cast<double>(at[j]) / norm;
            std::uint32_t index = 0;
            double nearest = 1;
            for (const float boundary : t.book.boundaries) {
              index += rotated > static_cast<double>(boundary) ? 1 : 0;
              nearest = std::min(nearest, std::fabs(rotated - static_cast<double>(boundary)));
            }
            const std::uint32_t code = e.code(d, row, i);
            if (nearest > 1e-6) {
              ASSERT_EQ(code, index) << dim << " " << bits;
            }
            const auto level = static_cast<double>(t.book.levels[code]);
            recon += level * level;
          }
          EXPECT_NEAR(e.scales[static_cast<std::size_t>(row)] * std::sqrt(recon) / norm, 1, 1e-5);
        }
      }
    }
  }
}

// Two values, by hand: norm 5, u = (0.6, 0.8), boundaries -0.7 0 0.8: 0.8 is not above 0.8.
TEST(AuraEncode, ByHand) {
  for (const auto kernel : kBothKernels) {
    AuraDesc d{.dim = 2, .bits = 2, .rotation = Rotation::identity};
    Tables t(d);
    t.book.boundaries = {-0.7f, 0, 0.8f};
    t.book.levels = {-0.75f, -0.25f, 0.75f, 1};
    EXPECT_EQ(encode(d, {3, 4}, t, kernel).packed[0], 2u | 2u << 2);
    EXPECT_EQ(encode(d, {3, 4}, t, kernel).scales[0], 5 / std::sqrt(1.125f));
    EXPECT_EQ(encode(d, {-4, 0}, t, kernel).packed[0], 0u | 1u << 2);
    d.scale_rule = ScaleRule::none;
    EXPECT_EQ(encode(d, {3, 4}, t, kernel).scales[0], 5);
    d.scale_rule = ScaleRule::unbiased;
    EXPECT_EQ(encode(d, {0, -4}, t, kernel).scales[0], 4 / 0.75f);
    d.scale_rule = ScaleRule::least_squares;
    EXPECT_EQ(encode(d, {0, -4}, t, kernel).scales[0], 4 * (0.75f / 0.625f));
  }
}

// ---- layout ----

// One token of three heads straight into a cache [heads, capacity, words].
TEST(AuraEncode, WritesIntoACache) {
  Gaussians gaussians(8);
  AuraDesc d{.dim = 128, .bits = 3};
  const Tables t(d);
  const auto x = gaussians.rows(3, 128);
  const Encoded want = encode(d, x, t);
  constexpr std::int64_t kCapacity = 5, kSlot = 2;
  const std::int64_t words = d.packed_shape()[1];
  std::vector<std::uint32_t> cache(static_cast<std::size_t>(3 * kCapacity * words), 0xabababab);
  std::vector<float> scales(3 * kCapacity, -1);
  expect_ok(run_op<AuraEncode>(
      d, {.x = view(x.data(), {3, 128}),
          .table = view(t.rotation.data(), {128}),
          .boundaries = view(t.book.boundaries.data(), {7}),
          .codebook = view(t.book.levels.data(), {8}),
          .packed = view(cache.data() + kSlot * words, {3, words}, kCapacity * words),
          .scales = view(scales.data() + kSlot, {3, 1}, kCapacity)}));
  for (std::int64_t head = 0; head < 3; ++head) {
    for (std::int64_t slot = 0; slot < kCapacity; ++slot) {
      const auto at = static_cast<std::size_t>(head * kCapacity + slot);
      EXPECT_EQ(scales[at], slot == kSlot ? want.scales[static_cast<std::size_t>(head)] : -1);
      for (std::int64_t w = 0; w < words; ++w)
        EXPECT_EQ(
            cache[at * static_cast<std::size_t>(words) + static_cast<std::size_t>(w)],
            slot == kSlot ? want.packed[static_cast<std::size_t>(head * words + w)] : 0xabababab);
    }
  }
}

TEST(AuraEncode, ErrorsNameTheFieldAndLeaveTheOutputsAlone) {
  const AuraDesc good{.rows = 2, .dim = 128};
  Tables t(good);
  std::vector<float> x(256, 1), scales(2, 7);
  std::vector<std::uint32_t> packed(64, 0xabcdef01u);
  const auto untouched = packed;
  const AuraEncode::Args args{.x = view(std::as_const(x).data(), {2, 128}),
                              .table = view(std::as_const(t.rotation).data(), {128}),
                              .boundaries = view(std::as_const(t.book.boundaries).data(), {15}),
                              .codebook = view(std::as_const(t.book.levels).data(), {16}),
                              .packed = view(packed.data(), {2, 16}),
                              .scales = view(scales.data(), {2, 1})};
  const auto with = [&](auto change) {
    AuraDesc d = good;
    change(d);
    return run_op<AuraEncode>(d, args);
  };
  const auto operand = [&](auto change) {
    AuraEncode::Args a = args;
    change(a);
    return run_op<AuraEncode>(good, a);
  };
  const auto table = [&](std::vector<float>& values, std::size_t i, float value) {
    const float before = values[i];
    values[i] = value;
    const Status status = run_op<AuraEncode>(good, args);
    values[i] = before;
    return status;
  };
  using D = AuraDesc&;
  using A = AuraEncode::Args&;
  const Code bad = Code::invalid_argument;
  expect_error(with([](D d) { d.bits = 0; }), bad, "aura_encode: bits: 0, expected 1..8");
  expect_error(with([](D d) { d.bits = 9; }), bad, "aura_encode: bits: 9, expected 1..8");
  expect_error(with([](D d) { d.dim = 1; }), bad, "aura_encode: dim: 1, expected 2..1024");
  expect_error(with([](D d) { d.dim = 1025; }), bad, "aura_encode: dim: 1025, expected 2..1024");
  expect_error(with([](D d) { d.dim = 100; }), bad,
               "aura_encode: dim: 100 with rotation hadamard, expected a power of two times "
               "one of 1 12 20 28 36 44 60");
  expect_error(with([](D d) { d.rows = -3; }), bad, "aura_encode: rows: -3, expected at least 0");
  expect_error(with([](D d) { d.scale_rule = static_cast<ScaleRule>(4); }), bad,
               "aura_encode: scale_rule: 4, expected 0..3");
  expect_error(with([](D d) { d.element = DType::f64; }), Code::unsupported,
               "aura_encode: element: f64, expected f32, f16 or bf16");
  expect_error(with([](D d) { d.f16_scale = true; }), bad,
               "aura_encode: scales: dtype f32, expected f16");
  expect_error(with([](D d) { d.bits = 3; }), bad,
               "aura_encode: boundaries: shape [15], expected [7] = [2^bits-1]: 3-bit codes have 7 "
               "boundaries, and "
               "15 are of 4 bits");
  expect_error(operand([](A a) { a.boundaries.shape[0] = 16; }), bad,
               "aura_encode: boundaries: shape [16], expected [15] = [2^bits-1]: 4-bit codes have "
               "15 boundaries");
  expect_error(
      operand([](A a) { a.codebook.shape[0] = 15; }), bad,
      "aura_encode: codebook: shape [15], expected [16] = [2^bits]: 4-bit codes have 16 levels");
  expect_error(operand([](A a) { a.packed.shape[1] = 17; }), bad,
               "aura_encode: packed: shape [2,17], expected [2,16] = [rows,words]: 4-bit codes "
               "have 16 words a row");
  expect_error(operand([](A a) { a.packed.stride[0] = 15; }), Code::unsupported,
               "aura_encode: packed: stride 15 of axis 0, expected at least 16");
  expect_error(operand([](A a) { a.scales.shape = {2}; }), bad,
               "aura_encode: scales: shape [2], expected [2,1] = [rows,1]");
  expect_error(table(t.book.boundaries, 5, 1.0f), bad,
               "aura_encode: boundaries: [6] is " + text_of(t.book.boundaries[6]) +
                   ", expected no less than the value before it");
  expect_error(table(t.book.boundaries, 14, INFINITY), bad,
               "aura_encode: boundaries: [14] is inf, expected a finite value");
  expect_error(table(t.book.levels, 0, NAN), bad,
               "aura_encode: codebook: [0] is nan, expected a finite value");
  expect_error(table(t.rotation, 127, 2.0f), bad,
               "aura_encode: table: [127] is 2, expected 1 or -1");
  EXPECT_EQ(packed, untouched);
  EXPECT_EQ(scales, std::vector<float>(2, 7));
  expect_ok(run_op<AuraEncode>(good, args));
  EXPECT_NE(packed, untouched);
}

}  // namespace
}  // namespace bittern
