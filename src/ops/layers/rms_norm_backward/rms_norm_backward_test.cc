#include "core/numerics.h"
#include "oracle/op_test.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using oracle::expect_error;
using oracle::expect_ok;
using oracle::kBothKernels;
using oracle::run_op;
using Op = RmsNormBackward;
using Floats = std::vector<float>;
using Doubles = std::vector<double>;

TEST(RmsNormBackward, MatchesRefEverywhere) { oracle::expect_parity("rms_norm_backward"); }

constexpr std::int64_t kRows = 130, kDim = 3;  // three blocks of rows

struct Inputs {
  Doubles x, weight;
};

// <d_y, y> of the f64 norm; a row's alone when `only` names one.
double loss(const Inputs& in, const Doubles& d_y, const RmsNormDesc& d, std::int64_t only = -1) {
  double sum = 0;
  for (std::int64_t i = 0; i < kRows; ++i) {
    if (only >= 0 && i != only) continue;
    double squares = 0;
    for (std::int64_t j = 0; j < kDim; ++j)
      squares += std::pow(in.x[static_cast<std::size_t>(i * kDim + j)], 2);
    const double rstd = 1 / std::sqrt(squares / kDim + d.eps);
    for (std::int64_t j = 0; j < kDim; ++j) {
      const auto at = static_cast<std::size_t>(i * kDim + j);
      sum += d_y[at] * in.x[at] * rstd * (in.weight[static_cast<std::size_t>(j)] + d.offset);
    }
  }
  return sum;
}

TEST(RmsNormBackward, IsTheDerivativeOfTheForward) {
  const RmsNormDesc d{.rows = kRows, .dim = kDim, .eps = 1e-2, .offset = 0.5};
  oracle::Rng rng(5);
  const auto make = [&](Floats& f, Doubles& x, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) {
      f.push_back(static_cast<float>(rng.normal()));
      x.push_back(static_cast<double>(f.back()));
    }
  };
  Inputs in;
  Doubles d_y, d_sum;
  Floats x, weight, d_y_f, d_sum_f;
  make(x, in.x, kRows * kDim);
  make(weight, in.weight, kDim);
  make(d_y_f, d_y, kRows * kDim);
  make(d_sum_f, d_sum, kRows * kDim);
  const auto slope = [&](Doubles Inputs::* member, std::size_t i, std::int64_t row) {
    constexpr double kStep = 1e-5;
    Inputs up = in, down = in;
    (up.*member)[i] += kStep;
    (down.*member)[i] -= kStep;
    return (loss(up, d_y, d, row) - loss(down, d_y, d, row)) / (2 * kStep);
  };
  for (const auto kernel : kBothKernels) {
    Floats d_x(x.size(), NAN), d_stream = d_sum_f, d_weight(weight.size(), NAN);
    Op::Args a{.d_y = view(std::as_const(d_y_f).data(), d.shape()),
               .x = view(std::as_const(x).data(), d.shape()),
               .weight = view(std::as_const(weight).data(), {kDim}),
               .d_x = view(d_x.data(), d.shape()),
               .d_weight = view(d_weight.data(), {kDim})};
    expect_ok(run_op<Op>(d, a, kernel));
    // With the residual stream, in place.
    a.d_sum = view(std::as_const(d_stream).data(), d.shape());
    a.d_x = view(d_stream.data(), d.shape());
    a.d_weight = {};
    expect_ok(run_op<Op>(d, a, kernel));
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double want = slope(&Inputs::x, i, static_cast<std::int64_t>(i) / kDim);
      EXPECT_NEAR(d_x[i], want, 2e-5) << kernel << " d_x " << i;
      EXPECT_EQ(d_stream[i], d_x[i] + d_sum_f[i]) << kernel << " with d_sum " << i;
    }
    for (std::size_t j = 0; j < weight.size(); ++j)
      EXPECT_NEAR(d_weight[j], slope(&Inputs::weight, j, -1), 1e-4) << kernel << " d_weight " << j;
  }
}

// x = 1, 1 with eps 0: rstd = 1 and n = x. e = d_y * weight = 2, 6, and e.n / 2 = 4.
TEST(RmsNormBackward, ByHand) {
  const float x[] = {1, 1}, weight[] = {1, 2}, d_y[] = {2, 3}, d_sum[] = {0.5f, 0.25f};
  for (const auto kernel : kBothKernels) {
    float d_x[2], d_weight[2];
    Op::Args a{.d_y = view(d_y, {1, 2}),
               .x = view(x, {1, 2}),
               .weight = view(weight, {2}),
               .d_sum = view(d_sum, {1, 2}),
               .d_x = view(d_x, {1, 2}),
               .d_weight = view(d_weight, {2})};
    expect_ok(run_op<Op>({.rows = 1, .dim = 2, .eps = 0}, a, kernel));
    EXPECT_EQ(d_x[0], -1.5f);
    EXPECT_EQ(d_x[1], 2.25f);
    EXPECT_EQ(d_weight[0], 2);
    EXPECT_EQ(d_weight[1], 3);
    // The weights 2, 3 = 1 + weight: e = 4, 9, and e.n / 2 = 6.5.
    a.d_sum = {};
    expect_ok(run_op<Op>({.rows = 1, .dim = 2, .eps = 0, .offset = 1}, a, kernel));
    EXPECT_EQ(d_x[0], -2.5f);
    EXPECT_EQ(d_x[1], 2.5f);
  }
}

// Rows 0 and 64 belong to different blocks: within a block the small terms vanish beside 2^24.
TEST(RmsNormBackward, SumsWeightsByBlocks) {
  const RmsNormDesc d{.rows = 65, .dim = 1, .eps = 0};
  Floats x(65, 1), weight(1, 1), d_y(65, 1), d_weight(1, NAN);
  d_y[0] = 0x1p24f;
  d_y[64] = 2;
  for (const auto kernel : kBothKernels) {
    expect_ok(run_op<Op>(d,
                         {.d_y = view(std::as_const(d_y).data(), d.shape()),
                          .x = view(std::as_const(x).data(), d.shape()),
                          .weight = view(std::as_const(weight).data(), {1}),
                          .d_weight = view(d_weight.data(), {1})},
                         kernel));
    EXPECT_EQ(d_weight[0], 0x1p24f + 2);
  }
}

// q of a fused projection: [tokens, heads, dim] with room for k and v after the heads. Its rows are
// not at equal distances, and a block of 64 rows spans several tokens.
TEST(RmsNormBackward, HeadsOfAProjectionAreTheSameRows) {
  constexpr std::int64_t kTokens = 23, kHeads = 3, kHead = 20, kToken = 5 * kHead;
  const RmsNormDesc d{.rows = kTokens * kHeads, .dim = kHead};
  oracle::Rng rng(9);
  Floats fused, weight, dense, d_y;
  for (std::int64_t i = 0; i < kTokens * kToken; ++i) {
    fused.push_back(static_cast<float>(rng.normal()));
    if (i % kToken < kHeads * kHead) dense.push_back(fused.back());
  }
  for (std::int64_t j = 0; j < kHead; ++j) weight.push_back(static_cast<float>(rng.normal()));
  for (std::size_t i = 0; i < dense.size(); ++i) d_y.push_back(static_cast<float>(rng.normal()));
  const Shape heads{kTokens, kHeads, kHead};
  for (const auto kernel : kBothKernels) {
    Floats d_x(dense.size()), d_weight(kHead), d_fused(fused.size(), 7), d_weight_2(kHead);
    Op::Args a{.d_y = view(std::as_const(d_y).data(), d.shape()),
               .x = view(std::as_const(dense).data(), d.shape()),
               .weight = view(std::as_const(weight).data(), {kHead}),
               .d_x = view(d_x.data(), d.shape()),
               .d_weight = view(d_weight.data(), {kHead})};
    expect_ok(run_op<Op>(d, a, kernel));
    a.x = view(std::as_const(fused).data(), heads, kToken);
    a.d_x = view(d_fused.data(), heads, kToken);
    a.d_weight = view(d_weight_2.data(), {kHead});
    expect_ok(run_op<Op>(d, a, kernel));
    EXPECT_EQ(d_weight, d_weight_2);
    std::size_t next = 0;
    for (std::size_t i = 0; i < fused.size(); ++i) {
      const bool is_q = i % kToken < kHeads * kHead;
      EXPECT_EQ(d_fused[i], is_q ? d_x[next++] : 7.0f) << kernel << " " << i;
    }
  }
}

TEST(RmsNormBackward, NaNsKeepToTheirRowAndColumn) {
  const RmsNormDesc d{.rows = 2, .dim = 20};
  for (const auto kernel : kBothKernels) {
    Floats x(40, 1), weight(20, 1), d_y(40, 1), d_x(40, 7), d_weight(20, 7);
    d_y[3] = NAN;
    expect_ok(run_op<Op>(d,
                         {.d_y = view(std::as_const(d_y).data(), d.shape()),
                          .x = view(std::as_const(x).data(), d.shape()),
                          .weight = view(std::as_const(weight).data(), {20}),
                          .d_x = view(d_x.data(), d.shape()),
                          .d_weight = view(d_weight.data(), {20})},
                         kernel));
    for (std::size_t i = 0; i < 40; ++i) EXPECT_EQ(std::isnan(d_x[i]), i < 20) << i;
    for (std::size_t j = 0; j < 20; ++j) EXPECT_EQ(std::isnan(d_weight[j]), j == 3) << j;
  }
}

TEST(RmsNormBackward, NoRowsGiveAWeightGradientOfZero) {
  const float weight[] = {1, 1};
  for (const auto kernel : kBothKernels) {
    float d_weight[] = {7, 7};
    Op::Args a;
    a.d_y = a.x = view(weight, {0, 2});
    a.weight = view(weight, {2});
    a.d_weight = view(d_weight, {2});
    expect_ok(run_op<Op>({.rows = 0, .dim = 2}, a, kernel));
    EXPECT_EQ(d_weight[0], 0);
    EXPECT_EQ(d_weight[1], 0);
  }
}

TEST(RmsNormBackward, ErrorsNameWhatIsWrong) {
  const Code bad = Code::invalid_argument;
  const std::string op = "rms_norm_backward: ";
  expect_error(Op::check({.rows = -1}), bad, op + "rows: -1, expected at least 0");
  expect_error(Op::check({.dim = 0}), bad, op + "dim: 0, expected 1..1048576");
  expect_error(Op::check({.eps = -1}), bad,
               op + "eps: -1, expected a number that is finite in f32 and at least 0");
  expect_error(Op::check({.offset = 1e300}), bad,
               op + "offset: 1e+300, expected a number that is finite in f32");
  expect_error(Op::check({.element = DType::f64}), Code::unsupported,
               op + "element: f64, expected f32, f16 or bf16");
  const float x[2] = {};
  float y[2] = {};
  const RmsNormDesc d{.rows = 1, .dim = 2};
  Op::Args a{.d_y = view(x, {1, 2}), .x = view(x, {1, 2}), .weight = view(x, {2})};
  expect_error(run_op<Op>(d, a), bad, op + "every output is left out, expected at least one");
  a.d_x = view(y, {1, 2});
  a.d_y = view(std::as_const(y), {1, 2});
  expect_error(run_op<Op>(d, a), bad, op + "d_x: overlaps d_y, expected memory of its own");
  a.d_y = view(x, {2, 1});
  expect_error(run_op<Op>(d, a), bad, op + "d_y: shape [2,1], expected [1,2] = [rows,dim]");
}

}  // namespace
}  // namespace bittern
