#include "core/numerics.h"
#include "oracle/op_test.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using oracle::expect_error;
using oracle::expect_ok;
using oracle::kBothKernels;
using oracle::run_op;
using Op = LogSoftmax;

TEST(LogSoftmax, MatchesRefEverywhere) { oracle::expect_parity("log_softmax"); }

// Two equal logits: -log 2 each. A logit alone: 0.
TEST(LogSoftmax, ByHand) {
  const float x[] = {5, 5};
  for (const auto kernel : kBothKernels) {
    float y[2];
    expect_ok(run_op<Op>({.rows = 1, .dim = 2}, {view(x, {1, 2}), view(y, {1, 2})}, kernel));
    EXPECT_EQ(y[0], -0.6931472f);
    EXPECT_EQ(y[1], -0.6931472f);
    expect_ok(run_op<Op>({.rows = 2, .dim = 1}, {view(x, {2, 1}), view(y, {2, 1})}, kernel));
    EXPECT_EQ(y[0], 0.0f);
  }
}

TEST(LogSoftmax, IsTheFormula) {
  for (const std::int64_t dim : {3, 1000, 50000}) {
    for (const double cap : {0.0, 7.0}) {
      for (const double temperature : {1.0, 0.5}) {
        const LogSoftmaxDesc d{.rows = 2, .dim = dim, .softcap = cap, .temperature = temperature};
        oracle::Rng rng(4);
        std::vector<float> x;
        for (std::int64_t i = 0; i < 2 * dim; ++i)
          x.push_back(static_cast<float>(5 * rng.normal()));
        for (const auto kernel : kBothKernels) {
          std::vector<float> y(x.size());
          expect_ok(run_op<Op>(
              d, {view(std::as_const(x).data(), d.shape()), view(y.data(), d.shape())}, kernel));
          const auto n = static_cast<std::size_t>(dim);
          for (std::size_t row = 0; row < 2; ++row) {
            const auto logit = [&](std::size_t j) {
              const auto v = static_cast<double>(x[row * n + j]);
              return (cap > 0 ? cap * std::tanh(v / cap) : v) / temperature;
            };
            double sum = 0;
            for (std::size_t j = 0; j < n; ++j) sum += std::exp(logit(j));
            double total = 0, worst = 0;
            for (std::size_t j = 0; j < n; ++j) {
              const auto got = static_cast<double>(y[row * n + j]);
              worst = std::max(worst, std::abs(got - (logit(j) - std::log(sum))));
              total += std::exp(got);
            }
            EXPECT_LT(worst, 1e-5);
            EXPECT_NEAR(total, 1, 2e-6);
          }
        }
      }
    }
  }
}

TEST(LogSoftmax, RowsThatAreNotFinite) {
  const float inf = std::numeric_limits<float>::infinity();
  const float x[4][3] = {{1, -inf, 1}, {1, inf, 2}, {NAN, 1, 2}, {-inf, -inf, -inf}};
  for (const auto kernel : kBothKernels) {
    float y[4][3];
    expect_ok(run_op<Op>({.rows = 4, .dim = 3}, {view(&x[0][0], {4, 3}), view(&y[0][0], {4, 3})},
                         kernel));
    EXPECT_EQ(y[0][0], -0.6931472f);
    EXPECT_EQ(y[0][1], -inf);
    for (const int row : {1, 2, 3})
      for (const float v : y[row]) EXPECT_TRUE(std::isnan(v)) << row;
  }
}

TEST(LogSoftmax, ErrorsNameWhatIsWrong) {
  const Code bad = Code::invalid_argument;
  const std::string op = "log_softmax: ";
  expect_error(Op::check({.rows = -1}), bad, op + "rows: -1, expected at least 0");
  expect_error(Op::check({.dim = 0}), bad, op + "dim: 0, expected 1..1048576");
  expect_error(Op::check({.softcap = -1}), bad, op + "softcap: -1, expected 0 or 2^-60..2^60");
  expect_error(Op::check({.temperature = 0}), bad, op + "temperature: 0, expected 2^-60..2^60");
  expect_error(Op::check({.element = DType::f64}), Code::unsupported,
               op + "element: f64, expected f32, f16 or bf16");
  const float x[2] = {};
  bf16 y[2] = {};
  expect_error(run_op<Op>({.rows = 1, .dim = 2}, {view(x, {1, 2}), view(y, {1, 2})}), bad,
               op + "y: dtype bf16, expected f32");
}

}  // namespace
}  // namespace bittern
