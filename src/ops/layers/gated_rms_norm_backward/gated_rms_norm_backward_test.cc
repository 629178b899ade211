#include "core/numerics.h"
#include "oracle/op_test.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using oracle::expect_error;
using oracle::expect_ok;
using oracle::kBothKernels;
using oracle::run_op;
using Op = GatedRmsNormBackward;
using Floats = std::vector<float>;
using Doubles = std::vector<double>;

TEST(GatedRmsNormBackward, MatchesRefEverywhere) {
  oracle::expect_parity("gated_rms_norm_backward");
}

constexpr std::int64_t kRows = 130, kDim = 3;  // three blocks of rows

struct Inputs {
  Doubles x, z, weight;
};

// <d_y, y> of the f64 norm; a row's alone when `only` names one.
double loss(const Inputs& in, const Doubles& d_y, double eps, std::int64_t only = -1) {
  double sum = 0;
  for (std::int64_t i = 0; i < kRows; ++i) {
    if (only >= 0 && i != only) continue;
    double squares = 0;
    for (std::int64_t j = 0; j < kDim; ++j)
      squares += std::pow(in.x[static_cast<std::size_t>(i * kDim + j)], 2);
    const double rstd = 1 / std::sqrt(squares / kDim + eps);
    for (std::int64_t j = 0; j < kDim; ++j) {
      const auto at = static_cast<std::size_t>(i * kDim + j);
      sum += d_y[at] * in.x[at] * rstd * in.weight[static_cast<std::size_t>(j)] * in.z[at] /
             (1 + std::exp(-in.z[at]));
    }
  }
  return sum;
}

TEST(GatedRmsNormBackward, IsTheDerivativeOfTheForward) {
  const GatedNormDesc d{.rows = kRows, .dim = kDim, .eps = 1e-2};
  oracle::Rng rng(5);
  const auto make = [&](Floats& f, Doubles& x, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) {
      f.push_back(static_cast<float>(rng.normal()));
      x.push_back(static_cast<double>(f.back()));
    }
  };
  Inputs in;
  Doubles d_y;
  Floats x, z, weight, d_y_f;
  make(x, in.x, kRows * kDim);
  make(z, in.z, kRows * kDim);
  make(weight, in.weight, kDim);
  make(d_y_f, d_y, kRows * kDim);
  for (const auto kernel : kBothKernels) {
    Floats d_x(x.size(), NAN), d_z(x.size(), NAN), d_weight(weight.size(), NAN);
    auto plan = Plan<Op>::select(d, {}, Preference::exact, kernel);
    ASSERT_TRUE(plan.ok());
    alignas(64) std::byte scratch[1024];
    ASSERT_LE(plan->workspace_bytes(), sizeof scratch);
    expect_ok(plan->run(
        {view(std::as_const(d_y_f).data(), d.shape()), view(std::as_const(x).data(), d.shape()),
         view(std::as_const(z).data(), d.shape()), view(std::as_const(weight).data(), {kDim}),
         view(d_x.data(), d.shape()), view(d_z.data(), d.shape()), view(d_weight.data(), {kDim})},
        {}, {scratch, sizeof scratch}));
    const auto slope = [&](Doubles Inputs::* member, std::size_t i, std::int64_t row) {
      constexpr double kStep = 1e-5;
      Inputs up = in, down = in;
      (up.*member)[i] += kStep;
      (down.*member)[i] -= kStep;
      return (loss(up, d_y, d.eps, row) - loss(down, d_y, d.eps, row)) / (2 * kStep);
    };
    for (std::size_t i = 0; i < x.size(); ++i) {
      const auto row = static_cast<std::int64_t>(i) / kDim;
      EXPECT_NEAR(d_x[i], slope(&Inputs::x, i, row), 2e-5) << kernel << " d_x " << i;
      EXPECT_NEAR(d_z[i], slope(&Inputs::z, i, row), 2e-5) << kernel << " d_z " << i;
    }
    for (std::size_t j = 0; j < weight.size(); ++j)
      EXPECT_NEAR(d_weight[j], slope(&Inputs::weight, j, -1), 1e-4) << kernel << " d_weight " << j;
  }
}

// Rows 0 and 64 belong to different blocks: within a block the small terms would vanish beside
// 2^24.
TEST(GatedRmsNormBackward, SumsWeightsByBlocks) {
  const GatedNormDesc d{.rows = 65, .dim = 1, .eps = 0};
  Floats x(65, 1), z(65, 100), weight(1, 1), d_y(65, 0.01f), d_weight(1, NAN);
  d_y[0] = 0x1p24f / 100;  // silu(100) = 100
  d_y[64] = 0.01f;
  const auto run = [&](std::string_view kernel) {
    auto plan = Plan<Op>::select(d, {}, Preference::exact, kernel);
    alignas(64) std::byte scratch[64];
    expect_ok(plan->run({view(std::as_const(d_y).data(), d.shape()),
                         view(std::as_const(x).data(), d.shape()),
                         view(std::as_const(z).data(), d.shape()),
                         view(std::as_const(weight).data(), {1}),
                         {},
                         {},
                         view(d_weight.data(), {1})},
                        {}, {scratch, sizeof scratch}));
    return d_weight[0];
  };
  float block = 0;
  for (std::size_t i = 0; i < 64; ++i) block = std::fma(d_y[i] * 100.0f, 1.0f, block);
  for (const auto kernel : kBothKernels) EXPECT_EQ(run(kernel), block + d_y[64] * 100.0f);
}

TEST(GatedRmsNormBackward, ErrorsNameWhatIsWrong) {
  const float x[2] = {};
  const GatedNormDesc d{.rows = 1, .dim = 2};
  expect_error(
      run_op<Op>(d, {view(x, {1, 2}), view(x, {1, 2}), view(x, {1, 2}), view(x, {2}), {}, {}, {}}),
      Code::invalid_argument,
      "gated_rms_norm_backward: every output is left out, expected at least one");
  expect_error(Op::check({.dim = -3}), Code::invalid_argument,
               "gated_rms_norm_backward: dim: -3, expected 1..1048576");
}

}  // namespace
}  // namespace bittern
