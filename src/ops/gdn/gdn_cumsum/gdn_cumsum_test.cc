#include <gtest/gtest.h>

#include "ops/gdn/gdn_test.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using Op = GdnCumsum;
using oracle::get;
using oracle::make_problem;
using oracle::put;
using oracle::run_problem;

TEST(GdnCumsum, MatchesRefEverywhere) { oracle::expect_parity("gdn_cumsum"); }

TEST(GdnCumsum, StartsAnewWithEachChunkAndSequence) {
  GdnDesc d{.tokens = 40, .value_heads = 2, .chunk = 16, .sequences = 3};
  for (const std::string_view kernel : oracle::kBothKernels) {
    auto p = make_problem<Op>(d, 1, {});
    oracle::set_values(p.args.cu_seqlens, {0, 20, 20, 40});
    for (std::int64_t t = 0; t < 40; ++t) {
      put(p.args.g, 2 * t, -1);
      put(p.args.g, 2 * t + 1, -1e4);
    }
    oracle::expect_ok(run_problem(p, kernel));
    for (std::int64_t t = 0; t < 40; ++t) {
      const std::int64_t terms = t % 20 % 16 + 1;
      EXPECT_EQ(get(p.args.sum, 2 * t), static_cast<double>(-terms)) << t;
      EXPECT_EQ(get(p.args.sum, 2 * t + 1), -1e4 * static_cast<double>(terms)) << t;
    }
  }
}

TEST(GdnCumsum, GateIsTheFormula) {
  GdnDesc d{.tokens = 3, .value_heads = 5, .gate = true};
  auto p = make_problem<Op>(d, 1, {});
  oracle::Rng rng(2);
  for (const ConstView& x : {p.args.g, p.args.a_log, p.args.dt_bias})
    for (std::int64_t i = 0; i < x.shape.numel(); ++i) put(x, i, 3 * rng.normal());
  oracle::expect_ok(run_problem(p));
  for (std::int64_t h = 0; h < 5; ++h) {
    double want = 0;
    for (std::int64_t t = 0; t < 3; ++t) {
      want -= std::exp(get(p.args.a_log, h)) *
              std::log1p(std::exp(get(p.args.g, t * 5 + h) + get(p.args.dt_bias, h)));
      EXPECT_NEAR(get(p.args.sum, t * 5 + h), want, 1e-6 * std::fabs(want));
    }
  }
}

TEST(GdnCumsum, RefusesWhatItCannotDo) {
  oracle::expect_error(Plan<Op>::select({.chunk = 65}).status(), Code::invalid_argument,
                       "gdn_cumsum: chunk: 65, expected 16, 32 or 64");
  GdnDesc d{.tokens = 3, .gate = true};
  auto p = make_problem<Op>(d, 1, {});
  p.args.dt_bias = {};
  const Status status = run_problem(p);
  EXPECT_EQ(status.code(), Code::invalid_argument);
  EXPECT_NE(status.message().find("dt_bias"), std::string_view::npos) << status.message();
}

}  // namespace
}  // namespace bittern
