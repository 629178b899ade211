#include "core/numerics.h"
#include "oracle/op_test.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using oracle::expect_error;
using oracle::expect_ok;
using oracle::kBothKernels;
using oracle::run_op;
using Op = RmsNorm;

TEST(RmsNorm, MatchesRefEverywhere) { oracle::expect_parity("rms_norm"); }

TEST(RmsNorm, IsTheFormula) {
  for (const std::int64_t dim : {1, 5, 128}) {
    for (const double offset : {0.0, 1.0}) {
      const RmsNormDesc d{.rows = 3, .dim = dim, .eps = 1e-3, .offset = offset};
      oracle::Rng rng(3);
      std::vector<float> x, residual, weight;
      for (std::int64_t i = 0; i < 3 * dim; ++i) {
        x.push_back(static_cast<float>(rng.normal()));
        residual.push_back(static_cast<float>(rng.normal()));
        if (i < dim) weight.push_back(static_cast<float>(rng.normal()));
      }
      for (const auto kernel : kBothKernels) {
        std::vector<float> y(x.size(), NAN), sum(x.size(), NAN);
        expect_ok(run_op<Op>(d,
                             {.x = view(std::as_const(x).data(), d.shape()),
                              .weight = view(std::as_const(weight).data(), {dim}),
                              .residual = view(std::as_const(residual).data(), d.shape()),
                              .y = view(y.data(), d.shape()),
                              .sum = view(sum.data(), d.shape())},
                             kernel));
        for (std::size_t i = 0; i < x.size(); ++i) EXPECT_EQ(sum[i], x[i] + residual[i]);
        for (std::size_t i = 0; i < 3; ++i) {
          const auto n = static_cast<std::size_t>(dim);
          double squares = 0;
          for (std::size_t j = 0; j < n; ++j)
            squares += std::pow(static_cast<double>(sum[i * n + j]), 2);
          const double rstd = 1 / std::sqrt(squares / static_cast<double>(dim) + 1e-3);
          for (std::size_t j = 0; j < n; ++j) {
            const double want = static_cast<double>(sum[i * n + j]) * rstd *
                                (static_cast<double>(weight[j]) + offset);
            EXPECT_NEAR(y[i * n + j], want, 1e-6 * std::max(1.0, std::abs(want)));
          }
        }
      }
    }
  }
}

// The residual stream in place, and the same without `sum`: s is rounded to bf16 before the norm.
// 256 + 1 = 257 is a tie between 256 and 258: 256 by its even last bit.
TEST(RmsNorm, RoundsTheSumBeforeTheNorm) {
  const RmsNormDesc d{.rows = 1, .dim = 2, .eps = 0, .element = DType::bf16};
  const bf16 x[] = {to_bf16(256), to_bf16(0)}, weight[] = {to_bf16(1), to_bf16(1)};
  for (const auto kernel : kBothKernels) {
    bf16 residual[] = {to_bf16(1), to_bf16(256)}, y[2], again[2];
    expect_ok(run_op<Op>(d,
                         {.x = view(x, {1, 2}),
                          .weight = view(weight, {2}),
                          .residual = view(static_cast<const bf16*>(residual), {1, 2}),
                          .y = view(again, {1, 2})},
                         kernel));
    expect_ok(run_op<Op>(d,
                         {.x = view(x, {1, 2}),
                          .weight = view(weight, {2}),
                          .residual = view(static_cast<const bf16*>(residual), {1, 2}),
                          .y = view(y, {1, 2}),
                          .sum = view(residual, {1, 2})},
                         kernel));
    for (const int j : {0, 1}) {
      EXPECT_EQ(to_f32(residual[j]), 256);
      EXPECT_EQ(to_f32(y[j]), 1);
      EXPECT_EQ(to_f32(again[j]), 1);
    }
  }
}

// x = 3, 4 with eps 0: x * rstd = 0.84852..., stored as 0.84765625 before the weight's product.
TEST(RmsNorm, RoundsOnceOrEachTime) {
  const bf16 x[] = {to_bf16(3), to_bf16(4)}, weight[] = {to_bf16(1.0078125f), to_bf16(1)};
  for (const auto kernel : kBothKernels) {
    for (const NormRounding rounding : {NormRounding::once, NormRounding::each}) {
      const RmsNormDesc d{
          .rows = 1, .dim = 2, .eps = 0, .element = DType::bf16, .rounding = rounding};
      bf16 y[2];
      expect_ok(run_op<Op>(
          d, {.x = view(x, {1, 2}), .weight = view(weight, {2}), .y = view(y, {1, 2})}, kernel));
      float want = 3 * (1.0f / std::sqrt(12.5f));
      if (rounding == NormRounding::each) want = to_f32(to_bf16(want));
      EXPECT_EQ(y[0].bits, to_bf16(want * 1.0078125f).bits);
    }
  }
}

TEST(RmsNorm, ZerosStayAndNaNsKeepToTheirRow) {
  const RmsNormDesc d{.rows = 2, .dim = 20};
  for (const auto kernel : kBothKernels) {
    std::vector<float> x(40, 0.0f), weight(20, 1.0f), y(40, 7.0f);
    x[3] = NAN;
    expect_ok(run_op<Op>(d,
                         {.x = view(std::as_const(x).data(), d.shape()),
                          .weight = view(std::as_const(weight).data(), {20}),
                          .y = view(y.data(), d.shape())},
                         kernel));
    for (std::size_t i = 0; i < 20; ++i) EXPECT_TRUE(std::isnan(y[i]));
    for (std::size_t i = 20; i < 40; ++i) EXPECT_EQ(y[i], 0.0f);
  }
}

TEST(RmsNorm, ErrorsNameWhatIsWrong) {
  const Code bad = Code::invalid_argument;
  const std::string op = "rms_norm: ";
  expect_error(Op::check({.rows = -1}), bad, op + "rows: -1, expected at least 0");
  expect_error(Op::check({.dim = 0}), bad, op + "dim: 0, expected 1..1048576");
  expect_error(Op::check({.eps = -1}), bad,
               op + "eps: -1, expected a number that is finite in f32 and at least 0");
  expect_error(Op::check({.offset = 1e300}), bad,
               op + "offset: 1e+300, expected a number that is finite in f32");
  expect_error(Op::check({.element = DType::u8}), Code::unsupported,
               op + "element: u8, expected f32, f16 or bf16");
  expect_error(Op::check({.rounding = static_cast<NormRounding>(2)}), bad,
               op + "rounding: 2, expected 0..1");
  const float x[2] = {};
  float y[2] = {};
  const RmsNormDesc d{.rows = 1, .dim = 2};
  Op::Args a{.x = view(x, {1, 2}), .weight = view(x, {1}), .y = view(y, {1, 2})};
  expect_error(run_op<Op>(d, a), bad, op + "weight: shape [1], expected [2] = [dim]");
  a.weight = view(x, {2});
  a.x = view(static_cast<const float*>(y), {1, 2});
  expect_error(run_op<Op>(d, a), bad, op + "y: overlaps x, expected memory of its own");
}

}  // namespace
}  // namespace bittern
