#include "core/numerics.h"
#include "oracle/op_test.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using oracle::expect_error;
using oracle::expect_ok;
using oracle::kBothKernels;
using oracle::run_op;
using Op = GatedRmsNorm;

TEST(GatedRmsNorm, MatchesRefEverywhere) { oracle::expect_parity("gated_rms_norm"); }

TEST(GatedRmsNorm, IsTheFormula) {
  for (const std::int64_t dim : {1, 5, 128}) {
    const GatedNormDesc d{.rows = 3, .dim = dim, .eps = 1e-3};
    oracle::Rng rng(3);
    std::vector<float> x, z, weight, y(static_cast<std::size_t>(3 * dim));
    for (std::int64_t i = 0; i < 3 * dim; ++i) {
      x.push_back(static_cast<float>(rng.normal()));
      z.push_back(static_cast<float>(rng.normal()));
      if (i < dim) weight.push_back(static_cast<float>(rng.normal()));
    }
    for (const auto kernel : kBothKernels) {
      expect_ok(run_op<Op>(
          d,
          {view(std::as_const(x).data(), d.shape()), view(std::as_const(z).data(), d.shape()),
           view(std::as_const(weight).data(), {dim}), view(y.data(), d.shape())},
          kernel));
      for (std::int64_t i = 0; i < 3; ++i) {
        double squares = 0;
        for (std::int64_t j = 0; j < dim; ++j)
          squares += std::pow(static_cast<double>(x[static_cast<std::size_t>(i * dim + j)]), 2);
        const double rstd = 1 / std::sqrt(squares / static_cast<double>(dim) + 1e-3);
        for (std::int64_t j = 0; j < dim; ++j) {
          const auto at = static_cast<std::size_t>(i * dim + j);
          const double gate = z[at];
          const double want = static_cast<double>(x[at]) * rstd *
                              static_cast<double>(weight[static_cast<std::size_t>(j)]) * gate /
                              (1 + std::exp(-gate));
          EXPECT_NEAR(y[at], want, 1e-6 * std::max(1.0, std::abs(want)));
        }
      }
    }
  }
}

// x = 3, 4 with eps 0: rstd = 1 / sqrt(12.5) = 0.28284..., so x * rstd = 0.84852..., 1.13137...
// Rounded to bf16 each time: 0.84765625 * 1.0078125 = 0.854..., stored 0.85546875.
TEST(GatedRmsNorm, RoundsOnceOrEachTime) {
  const bf16 x[] = {to_bf16(3), to_bf16(4)}, weight[] = {to_bf16(1.0078125f), to_bf16(1)};
  const bf16 z[] = {to_bf16(100), to_bf16(100)};  // silu(100) = 100
  for (const auto kernel : kBothKernels) {
    for (const NormRounding rounding : {NormRounding::once, NormRounding::each}) {
      const GatedNormDesc d{
          .rows = 1, .dim = 2, .eps = 0, .element = DType::bf16, .rounding = rounding};
      bf16 y[2];
      expect_ok(run_op<Op>(
          d, {view(x, {1, 2}), view(z, {1, 2}), view(weight, {2}), view(y, {1, 2})}, kernel));
      const float rstd = 1.0f / std::sqrt(12.5f);
      float want = 3 * rstd;
      if (rounding == NormRounding::each) want = to_f32(to_bf16(want));
      want *= 1.0078125f;
      if (rounding == NormRounding::each) want = to_f32(to_bf16(want));
      EXPECT_EQ(y[0].bits, to_bf16(want * 100).bits);
    }
  }
}

TEST(GatedRmsNorm, ZerosStayAndNaNsKeepToTheirRow) {
  const GatedNormDesc d{.rows = 2, .dim = 20};
  for (const auto kernel : kBothKernels) {
    std::vector<float> x(40, 0.0f), z(40, 1.0f), weight(20, 1.0f), y(40, 7.0f);
    x[3] = NAN;
    expect_ok(run_op<Op>(
        d,
        {view(std::as_const(x).data(), d.shape()), view(std::as_const(z).data(), d.shape()),
         view(std::as_const(weight).data(), {20}), view(y.data(), d.shape())},
        kernel));
    for (std::size_t i = 0; i < 20; ++i) EXPECT_TRUE(std::isnan(y[i]));
    for (std::size_t i = 20; i < 40; ++i) EXPECT_EQ(y[i], 0.0f);
  }
}

TEST(GatedRmsNorm, ErrorsNameWhatIsWrong) {
  const Code bad = Code::invalid_argument;
  const std::string op = "gated_rms_norm: ";
  expect_error(Op::check({.rows = -1}), bad, op + "rows: -1, expected at least 0");
  expect_error(Op::check({.dim = 0}), bad, op + "dim: 0, expected 1..1048576");
  expect_error(Op::check({.eps = -1}), bad,
               op + "eps: -1, expected a number that is finite in f32 and at least 0");
  expect_error(Op::check({.element = DType::u8}), Code::unsupported,
               op + "element: u8, expected f32, f16 or bf16");
  const float x[2] = {};
  float y[2] = {};
  expect_error(run_op<Op>({.rows = 1, .dim = 2},
                          {view(x, {1, 2}), view(x, {1, 2}), view(x, {1}), view(y, {1, 2})}),
               bad, op + "weight: shape [1], expected [2] = [dim]");
}

}  // namespace
}  // namespace bittern
