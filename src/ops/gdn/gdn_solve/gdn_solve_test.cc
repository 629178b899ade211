#include <gtest/gtest.h>

#include "ops/gdn/gdn_test.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using Op = GdnSolve;
using oracle::get;
using oracle::make_problem;
using oracle::put;
using oracle::run_problem;

TEST(GdnSolve, MatchesRefEverywhere) { oracle::expect_parity("gdn_solve"); }

TEST(GdnSolve, MatchesAnExampleWorkedByHand) {
  const GdnDesc d{.tokens = 3, .chunk = 16};
  for (const std::string_view kernel : oracle::kBothKernels) {
    auto p = make_problem<Op>(d, 1, {});
    oracle::set_all(p.args.l, NAN);  // only what lies below the diagonal is read
    put(p.args.l, 16, 2);
    put(p.args.l, 32, 3);
    put(p.args.l, 33, 5);
    oracle::expect_ok(run_problem(p, kernel));
    std::vector<double> want(48, 0.0);
    want[0] = want[17] = want[34] = 1;
    want[16] = -2;
    want[32] = -3 + 5 * 2;
    want[33] = -5;
    EXPECT_EQ(oracle::values(p.args.a), want) << kernel;
  }
}

// A (I + L) = I, in f64, for every chunk size and a ragged last chunk.
TEST(GdnSolve, IsTheInverse) {
  for (const std::int32_t chunk : {16, 32, 64}) {
    const GdnDesc d{.tokens = 150, .value_heads = 2, .chunk = chunk};
    auto p = make_problem<Op>(d, 1, {});
    oracle::Rng rng(6);
    oracle::fill_uniform(p.args.l, -0.3, 0.3, rng);
    oracle::expect_ok(run_problem(p));
    for (std::int64_t t = 0; t < d.tokens; ++t) {
      const std::int64_t i = t % chunk;
      for (std::int64_t j = 0; j < chunk; ++j) {
        const double element = get(p.args.a, t * 2 * chunk + j);
        if (j > i) {
          EXPECT_EQ(element, 0);
          continue;
        }
        double product = element;
        for (std::int64_t m = j + 1; m <= i; ++m)
          product += get(p.args.a, t * 2 * chunk + m) * get(p.args.l, (t - i + m) * 2 * chunk + j);
        EXPECT_NEAR(product, i == j ? 1 : 0, 1e-4);
      }
    }
  }
}

// The kernel leaves out columns above the diagonal, but not where L is not finite: a NaN or an
// infinity of a row makes all that ref makes of it. Rows are also written where no 16 bytes are
// aligned.
TEST(GdnSolve, CudaPutsNonFiniteValuesWhereTheyBelong) {
  BITTERN_NEEDS_CUDA();
  for (const std::int64_t row : {1, 20, 31, 32, 60}) {
    for (const double value : {double{NAN}, double{INFINITY}}) {
      for (const bool unaligned : {false, true}) {
        const GdnDesc d{.tokens = 100, .value_heads = 2};
        auto want = make_problem<Op>(d, 3, {.unaligned = unaligned});
        auto got = make_problem<Op>(d, 3, {.unaligned = unaligned});
        for (auto* p : {&want, &got}) {
          oracle::Rng rng(6);
          oracle::fill_uniform(p->args.l, -0.3, 0.3, rng);
          put(p->args.l, row * 2 * 64, value);
        }
        oracle::expect_ok(run_problem(want, "ref"));
        oracle::expect_ok(run_problem(got, "cuda", Preference::exact, oracle::kGpu));
        EXPECT_EQ(oracle::compare(got, want), "") << row << " " << value;
      }
    }
  }
}

TEST(GdnSolve, RefusesWhatItCannotDo) {
  // No elements, but strides that no integer holds.
  oracle::expect_error(
      Plan<Op>::select({.batch = 0, .tokens = std::int64_t{1} << 59, .value_heads = 2}).status(),
      Code::invalid_argument, "gdn_solve: sizes: more than 2^59 elements");
  oracle::expect_error(Plan<Op>::select({.a_element = DType::f16}).status(), Code::unsupported,
                       "gdn_solve: a_element: f16, expected f32 or bf16");
}

}  // namespace
}  // namespace bittern
