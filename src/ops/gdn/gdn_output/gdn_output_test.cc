#include <gtest/gtest.h>

#include "ops/gdn/gdn_test.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using Op = GdnOutput;
using oracle::make_problem;
using oracle::run_problem;
using oracle::values;

TEST(GdnOutput, MatchesRefEverywhere) { oracle::expect_parity("gdn_output"); }

TEST(GdnOutput, MatchesAnExampleWorkedByHand) {
  GdnDesc d{.tokens = 2, .key_dim = 2, .value_dim = 1, .chunk = 16};
  d.scale = 0.5;
  for (const std::string_view kernel : oracle::kBothKernels) {
    auto p = make_problem<Op>(d, 1, {});
    oracle::set_values(p.args.q, {1, 2, 3, 4});
    oracle::set_values(p.args.k, {1, 1, 2, 0});
    oracle::set_values(p.args.v_new, {10, 100});
    oracle::set_values(p.args.h, {5, 7});
    oracle::set_values(p.args.g, {0, -1e4});
    oracle::expect_ok(run_problem(p, kernel));
    EXPECT_EQ(values(p.args.o), (std::vector<double>{0.5 * (19 + 30), 0.5 * 600})) << kernel;
    oracle::set_values(p.args.g, {0, 0});
    oracle::expect_ok(run_problem(p, kernel));
    EXPECT_EQ(values(p.args.o), (std::vector<double>{0.5 * (19 + 30), 0.5 * (43 + 70 + 600)}));
  }
}

// The whole chain, op by op, against the rule token by token in f64.
struct Chain {
  std::vector<double> o, final_state;
  oracle::GdnResult want;
};

Chain run_chain(const GdnDesc& d, double common, double decay, std::uint64_t seed) {
  auto output = make_problem<GdnOutput>(d, seed, {});
  auto state = make_problem<GdnState>(d, seed, {});
  auto factors = make_problem<GdnRecomputeWU>(d, seed, {});
  auto inverse = make_problem<GdnSolve>(d, seed, {});
  auto products = make_problem<GdnKkt>(d, seed, {});
  auto sums = make_problem<GdnCumsum>(d, seed, {});
  oracle::Rng rng(seed);
  oracle::fill_keys(d, output.args.q, 0, rng);
  oracle::fill_keys(d, products.args.k, common, rng);
  oracle::fill_normal(factors.args.v, rng);
  oracle::fill_uniform(products.args.beta, 0, 1, rng);
  oracle::fill_uniform(sums.args.g, -2 * decay, 0, rng);
  oracle::fill_normal(state.args.initial_state, rng);

  oracle::GdnValues x{values(output.args.q), values(products.args.k),    values(factors.args.v),
                      values(sums.args.g),   values(products.args.beta), {}};
  x.initial_state = oracle::keys_first(d, values(state.args.initial_state));
  Chain r;
  r.want = oracle::gdn_recurrence(d, oracle::gdn_starts(d, output.args.cu_seqlens), x);

  oracle::expect_ok(run_problem(sums));
  products.args.g = factors.args.g = state.args.g = output.args.g = sums.args.sum;
  oracle::expect_ok(run_problem(products));
  inverse.args.l = products.args.l;
  oracle::expect_ok(run_problem(inverse));
  factors.args.a = inverse.args.a;
  factors.args.beta = products.args.beta;
  factors.args.k = state.args.k = output.args.k = products.args.k;
  oracle::expect_ok(run_problem(factors));
  state.args.w = factors.args.w;
  state.args.u = factors.args.u;
  oracle::expect_ok(run_problem(state));
  output.args.h = state.args.h;
  output.args.v_new = state.args.v_new;
  oracle::expect_ok(run_problem(output));
  r.o = values(output.args.o);
  r.final_state = oracle::keys_first(d, values(state.args.final_state));
  return r;
}

TEST(GdnOutput, TheChainIsTheRecurrenceInF32) {
  for (const std::int32_t chunk : {16, 32, 64}) {
    for (const double decay : {0.0, 0.05, 10.0}) {
      GdnDesc d{.batch = 2, .tokens = 133, .key_heads = 1, .value_heads = 3};
      d.key_dim = 32;
      d.value_dim = 40;
      d.chunk = chunk;
      if (chunk == 32) d.state_layout = StateLayout::value_key;
      const Chain r = run_chain(d, 0.5, decay, 1);
      EXPECT_LE(oracle::nmse(r.o, r.want.o), 1e-7) << chunk << " " << decay;
      EXPECT_LE(oracle::nmse(r.final_state, r.want.final_state), 1e-7) << chunk << " " << decay;
    }
  }
}

TEST(GdnOutput, TheChainIsTheRecurrenceInBf16) {
  for (const double common : {0.0, 0.9}) {
    for (const double decay : {0.0, 0.05, 1.0}) {
      GdnDesc d{.tokens = 512, .key_heads = 1, .value_heads = 2};
      d.element = DType::bf16;
      const Chain r = run_chain(d, common, decay, 2);
      const double bound = common == 0 ? 0.005 : 0.01;
      EXPECT_LE(oracle::rms_ratio(r.o, r.want.o), bound) << common << " " << decay;
      EXPECT_LE(oracle::rms_ratio(r.final_state, r.want.final_state), bound)
          << common << " " << decay;
    }
  }
}

TEST(GdnOutput, RefusesWhatItCannotDo) {
  GdnDesc d;
  d.scale = std::numeric_limits<double>::infinity();
  oracle::expect_error(Plan<Op>::select(d).status(), Code::invalid_argument,
                       "gdn_output: scale: inf, expected a number that is finite in f32");
  d.scale = 1e39;
  oracle::expect_error(Op::check(d), Code::invalid_argument,
                       "gdn_output: scale: 1e+39, expected a number that is finite in f32");
}

}  // namespace
}  // namespace bittern
