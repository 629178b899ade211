#include "core/numerics.h"
#include "oracle/op_test.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using oracle::expect_error;
using oracle::expect_ok;
using oracle::kBothKernels;
using oracle::run_op;
using Op = Adam;

TEST(Adam, MatchesRefEverywhere) { oracle::expect_parity("adam"); }

struct State {
  std::vector<float> gradient, parameter, mean, variance;
  explicit State(std::size_t n) : gradient(n), parameter(n), mean(n), variance(n) {}
  Op::Args args() {
    const auto n = static_cast<std::int64_t>(gradient.size());
    return {view(std::as_const(gradient).data(), {n}), view(parameter.data(), {n}),
            view(mean.data(), {n}), view(variance.data(), {n})};
  }
};

// The first step goes `rate` against the sign of the gradient, whatever its size: both corrections
// are undone.
TEST(Adam, TheFirstStepIsTheRate) {
  for (const auto kernel : kBothKernels) {
    State s(4);
    s.gradient = {3, -1e-6f, 1e6f, 0};
    s.parameter = {1, 1, 1, 1};
    expect_ok(run_op<Op>({.count = 4, .rate = 0.25, .epsilon = 1e-20}, s.args(), kernel));
    EXPECT_FLOAT_EQ(s.parameter[0], 0.75f);
    EXPECT_FLOAT_EQ(s.parameter[1], 1.25f);
    EXPECT_FLOAT_EQ(s.parameter[2], 0.75f);
    EXPECT_EQ(s.parameter[3], 1);  // 0 / epsilon
  }
}

// beta1 = 1/2, beta2 = 3/4, step 2: 1 - beta1^2 = 3/4 and 1 - beta2^2 = 7/16, whose root is
// 0.66143782777. mean = 1/2 * 4 + 1/2 * 2 = 3; variance = 3/4 * 12 + 1/4 * 4 = 10.
TEST(Adam, ByHand) {
  const AdamDesc d{.count = 1, .rate = 0.5, .beta1 = 0.5, .beta2 = 0.75, .epsilon = 1, .step = 2};
  for (const auto kernel : kBothKernels) {
    State s(1);
    s.gradient = {2};
    s.parameter = {10};
    s.mean = {4};
    s.variance = {12};
    expect_ok(run_op<Op>(d, s.args(), kernel));
    EXPECT_EQ(s.mean[0], 3);
    EXPECT_EQ(s.variance[0], 10);
    const double size = std::sqrt(10.0) / 0.66143782777 + 1;
    EXPECT_NEAR(s.parameter[0], 10 - (0.5 / 0.75) * 3 / size, 1e-6);
  }
}

// A thousand steps against the textbook in f64, with powers by std::pow.
TEST(Adam, FollowsTheTextbook) {
  constexpr std::size_t kCount = 19;
  for (const auto kernel : kBothKernels) {
    oracle::Rng rng(3);
    State s(kCount);
    std::vector<double> parameter(kCount), mean(kCount), variance(kCount);
    for (std::int64_t step = 1; step <= 1000; ++step) {
      const AdamDesc d{.count = kCount, .rate = 0.01, .step = step};
      for (std::size_t i = 0; i < kCount; ++i) {
        s.gradient[i] = static_cast<float>((rng.normal() + 0.3) * std::pow(10.0, i % 5));
        const auto g = static_cast<double>(s.gradient[i]);
        mean[i] = 0.9 * mean[i] + 0.1 * g;
        variance[i] = 0.999 * variance[i] + 0.001 * g * g;
        const auto t = static_cast<double>(step);
        const double m = mean[i] / (1 - std::pow(0.9, t));
        const double v = variance[i] / (1 - std::pow(0.999, t));
        parameter[i] -= 0.01 * m / (std::sqrt(v) + 1e-8);
      }
      expect_ok(run_op<Op>(d, s.args(), kernel));
    }
    for (std::size_t i = 0; i < kCount; ++i) {
      EXPECT_NEAR(s.parameter[i], parameter[i], 2e-5 * std::abs(parameter[i]) + 1e-5);
      EXPECT_NEAR(s.mean[i], mean[i], 1e-5 * std::sqrt(variance[i]));
      EXPECT_NEAR(s.variance[i], variance[i], 2e-5 * variance[i]);
    }
  }
}

TEST(Adam, NaNStaysInItsElement) {
  for (const auto kernel : kBothKernels) {
    State s(33);
    s.gradient.assign(33, 1);
    s.gradient[20] = NAN;
    expect_ok(run_op<Op>({.count = 33}, s.args(), kernel));
    for (std::size_t i = 0; i < 33; ++i) {
      for (const auto* v : {&s.parameter, &s.mean, &s.variance})
        EXPECT_EQ(std::isnan((*v)[i]), i == 20) << i;
    }
  }
}

TEST(Adam, ErrorsNameWhatIsWrong) {
  const Code bad = Code::invalid_argument;
  const std::string op = "adam: ", below = ", expected at least 0 and below 1";
  expect_error(Op::check({.count = -1}), bad, op + "count: -1, expected at least 0");
  expect_error(Op::check({.count = std::int64_t{1} << 60}), bad,
               op + "sizes: more than 2^59 elements");
  expect_error(Op::check({.rate = 1e39}), bad,
               op + "rate: 1e+39, expected a number that is finite in f32");
  expect_error(Op::check({.beta1 = 1}), bad, op + "beta1: 1" + below);
  expect_error(Op::check({.beta1 = NAN}), bad, op + "beta1: nan" + below);
  expect_error(Op::check({.beta2 = -0.5}), bad, op + "beta2: -0.5" + below);
  expect_error(Op::check({.epsilon = -1}), bad, op + "epsilon: -1, expected at least 0");
  expect_error(Op::check({.epsilon = 1e39}), bad,
               op + "epsilon: 1e+39, expected a number that is finite in f32");
  expect_error(Op::check({.step = 0}), bad, op + "step: 0, expected at least 1");
  State s(2);
  Op::Args a = s.args();
  a.mean = a.variance;
  expect_error(run_op<Op>({.count = 2}, a), bad,
               op + "variance: overlaps mean, expected memory of its own");
  a = s.args();
  a.gradient = view(std::as_const(s.gradient).data(), {1});
  expect_error(run_op<Op>({.count = 2}, a), bad,
               op + "gradient: shape [1], expected [2] = [count]");
  a = s.args();
  a.mean = {};
  expect_error(run_op<Op>({.count = 2}, a), bad, op + "mean: null, expected f32 [2]");
}

}  // namespace
}  // namespace bittern
