#include "core/angle.h"
#include "core/numerics.h"
#include "oracle/op_test.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using oracle::expect_error;
using oracle::expect_ok;
using oracle::kBothKernels;
using oracle::run_op;
using Op = Rope;

TEST(Rope, MatchesRefEverywhere) { oracle::expect_parity("rope"); }

// A quarter turn, f32(pi / 2), takes (1, 0) to (0, 1): cos is 2^-24.5, the distance of f32(pi / 2)
// to pi / 2.
TEST(Rope, ByHand) {
  const float x[] = {1, 2, 0, 3, 9}, inverse[] = {1.57079637f, 0};
  const std::int32_t position = 1;
  for (const auto kernel : kBothKernels) {
    for (const RopeLayout layout : {RopeLayout::half, RopeLayout::interleaved}) {
      float y[5];
      expect_ok(run_op<Op>(
          {.tokens = 1, .dim = 5, .rotary_dim = 4, .factor = 2, .layout = layout},
          {view(x, {1, 1, 5}), view(&position, {1}), view(inverse, {2}), view(y, {1, 1, 5})},
          kernel));
      const float c = 2 * -4.37113883e-8f;
      if (layout == RopeLayout::half) {  // (1, 0) by a quarter, (2, 3) not at all
        EXPECT_EQ(y[0], c);
        EXPECT_EQ(y[2], 2);
        EXPECT_EQ(y[1], 4);
        EXPECT_EQ(y[3], 6);
      } else {  // (1, 2) by a quarter, (0, 3) not at all
        EXPECT_EQ(y[0], c - 4);
        EXPECT_EQ(y[1], 2 * c + 2);
        EXPECT_EQ(y[2], 0);
        EXPECT_EQ(y[3], 6);
      }
      EXPECT_EQ(y[4], 9);
    }
  }
}

// core/angle.h against libm in f64: products of positions up to 2^20 with frequencies up to 1.
TEST(Rope, CosAndSinAreWithinTheirBound) {
  oracle::Rng rng(11);
  double worst = 0, worst_ulps = 0;
  for (int i = 0; i < 2000000; ++i) {
    const auto position = static_cast<double>(rng.below((1 << 20) + 1));
    const double inverse = static_cast<double>(
        static_cast<float>(i % 2 == 0 ? rng.uniform() : std::exp(-14 * rng.uniform())));
    double a = position * inverse;
    if (i % 16 == 0) a = -a * 1023;  // up to 2^30
    const angle::CosSin got = angle::cos_sin(a);
    const double want[] = {std::cos(a), std::sin(a)}, found[] = {got.cos, got.sin};
    for (const int k : {0, 1}) {
      worst = std::max(worst, std::abs(found[k] - want[k]));
      const double ulp = std::ldexp(1.0, std::ilogb(std::max(std::abs(want[k]), 1e-30)) - 23);
      worst_ulps = std::max(
          worst_ulps, std::abs(static_cast<double>(static_cast<float>(found[k])) - want[k]) / ulp);
    }
  }
  EXPECT_LE(worst, 0x1p-35);
  EXPECT_LE(worst_ulps, 0.501);
  RecordProperty("worst", std::to_string(worst * 0x1p35));
  RecordProperty("worst_ulps", std::to_string(worst_ulps));
}

TEST(Rope, LargeAnglesAreNaN) {
  const float x[] = {1, 1}, inverse[] = {2};
  for (const auto kernel : kBothKernels) {
    for (const std::int32_t position : {536870911, 536870912, -536870912, 2147483647}) {
      float y[2];
      expect_ok(run_op<Op>(
          {.tokens = 1, .dim = 2, .rotary_dim = 2},
          {view(x, {1, 1, 2}), view(&position, {1}), view(inverse, {1}), view(y, {1, 1, 2})},
          kernel));
      EXPECT_EQ(std::isnan(y[0]), position != 536870911) << position;
      EXPECT_EQ(std::isnan(y[1]), position != 536870911) << position;
    }
  }
}

// A dot product of two rotated rows depends on the difference of their positions alone.
TEST(Rope, DotProductsSeeDifferencesOfPositions) {
  const RopeDesc d{.tokens = 2, .dim = 64, .rotary_dim = 64};
  oracle::Rng rng(2);
  std::vector<float> x, inverse;
  for (int i = 0; i < 128; ++i) x.push_back(static_cast<float>(rng.normal()));
  for (int i = 0; i < 32; ++i) inverse.push_back(static_cast<float>(std::pow(1e4, -i / 32.0)));
  double first = 0;
  for (const std::int32_t shift : {0, 1, 1000, 1048000}) {
    const std::int32_t positions[] = {shift + 5, shift + 12};
    std::vector<float> y(128);
    expect_ok(
        run_op<Op>(d, {view(std::as_const(x).data(), d.shape()), view(positions, {2}),
                       view(std::as_const(inverse).data(), {32}), view(y.data(), d.shape())}));
    double dot = 0;
    for (std::size_t j = 0; j < 64; ++j)
      dot += static_cast<double>(y[j]) * static_cast<double>(y[64 + j]);
    if (shift == 0) first = dot;
    EXPECT_NEAR(dot, first, 1e-5);
  }
}

// With negated frequencies rope is the transpose of what it was, <rope x, g> = <x, rope g>, and so
// its gradient; on what it turned it gives back x times factor^2, and copied elements as they are.
TEST(Rope, NegatedFrequenciesGiveTheGradient) {
  for (const RopeLayout layout : {RopeLayout::half, RopeLayout::interleaved}) {
    const RopeDesc d{
        .tokens = 3, .heads = 2, .dim = 21, .rotary_dim = 16, .factor = 1.25, .layout = layout};
    const auto n = static_cast<std::size_t>(d.shape().numel());
    oracle::Rng rng(8);
    std::vector<float> x, g, inverse, back;
    for (std::size_t i = 0; i < n; ++i) {
      x.push_back(static_cast<float>(rng.normal()));
      g.push_back(static_cast<float>(rng.normal()));
    }
    for (int i = 0; i < 8; ++i) {
      inverse.push_back(static_cast<float>(std::pow(1e4, -i / 8.0)));
      back.push_back(-inverse.back());
    }
    const std::int32_t positions[] = {0, 7, 100003};
    for (const auto kernel : kBothKernels) {
      const auto rope = [&](const std::vector<float>& in, const std::vector<float>& frequencies) {
        std::vector<float> y(n, NAN);
        expect_ok(run_op<Op>(d,
                             {view(in.data(), d.shape()), view(positions, {3}),
                              view(frequencies.data(), {8}), view(y.data(), d.shape())},
                             kernel));
        return y;
      };
      const std::vector<float> y = rope(x, inverse), d_x = rope(g, back), again = rope(y, back);
      double forward = 0, backward = 0;
      for (std::size_t i = 0; i < n; ++i) {
        forward += static_cast<double>(y[i]) * static_cast<double>(g[i]);
        backward += static_cast<double>(x[i]) * static_cast<double>(d_x[i]);
        const float factor = i % 21 < 16 ? 1.25f * 1.25f : 1.0f;
        EXPECT_NEAR(again[i], factor * x[i], 2e-6) << i;
      }
      EXPECT_NEAR(forward, backward, 2e-5);
      EXPECT_GT(std::abs(forward), 1);  // not two zeros
    }
  }
}

TEST(Rope, ErrorsNameWhatIsWrong) {
  const Code bad = Code::invalid_argument;
  const std::string op = "rope: ";
  expect_error(Op::check({.tokens = -1}), bad, op + "tokens: -1, expected at least 0");
  expect_error(Op::check({.heads = -1}), bad, op + "heads: -1, expected at least 0");
  expect_error(Op::check({.dim = 0}), bad, op + "dim: 0, expected 1..1048576");
  expect_error(Op::check({.dim = 64}), bad, op + "rotary_dim: 128, expected 0..64");
  expect_error(Op::check({.rotary_dim = 63}), bad, op + "rotary_dim: 63, expected an even number");
  expect_error(Op::check({.factor = 1e39}), bad,
               op + "factor: 1e+39, expected a number that is finite in f32");
  expect_error(Op::check({.element = DType::s32}), Code::unsupported,
               op + "element: s32, expected f32, f16 or bf16");
  expect_error(Op::check({.layout = static_cast<RopeLayout>(2)}), bad,
               op + "layout: 2, expected 0..1");
  const float x[4] = {}, inverse[3] = {};
  const std::int32_t positions[1] = {};
  float y[4];
  expect_error(run_op<Op>({.tokens = 1, .dim = 4, .rotary_dim = 4},
                          {view(x, {1, 1, 4}), view(positions, {1}), view(inverse, {3}),
                           view(y, {1, 1, 4})}),
               bad, op + "inverse_frequencies: shape [3], expected [2] = [rotary_dim/2]");
}

}  // namespace
}  // namespace bittern
