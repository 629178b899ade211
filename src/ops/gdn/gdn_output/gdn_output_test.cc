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

// The whole chain, op by op, against the rule token by token in f64; with Preference::fastest by
// the kernels on tensor cores.
struct Chain {
  std::vector<double> o, final_state;
  oracle::GdnResult want;
};

Chain run_chain(const GdnDesc& d, double common, double decay, std::uint64_t seed,
                Preference preference = Preference::exact) {
  const bool fast = preference == Preference::fastest;
  const auto run = [&](auto& problem, std::string_view fastest) {
    oracle::expect_ok(fast ? run_problem(problem, fastest, preference, oracle::kGpu)
                           : run_problem(problem));
  };
  const auto hand_on = [](const ConstView& from, const ConstView& to) {
    oracle::set_values(to, values(from));
  };
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

  run(sums, "cuda");
  for (const ConstView& g : {products.args.g, factors.args.g, state.args.g, output.args.g})
    hand_on(sums.args.sum, g);
  for (const ConstView& k : {factors.args.k, state.args.k, output.args.k})
    hand_on(products.args.k, k);
  run(products, "cuda_mma");
  hand_on(products.args.l, inverse.args.l);
  run(inverse, "cuda");
  hand_on(inverse.args.a, factors.args.a);
  hand_on(products.args.beta, factors.args.beta);
  run(factors, "cuda_wgmma");
  hand_on(factors.args.w, state.args.w);
  hand_on(factors.args.u, state.args.u);
  run(state, "cuda_wgmma");
  hand_on(state.args.h, output.args.h);
  hand_on(state.args.v_new, output.args.v_new);
  run(output, "cuda_wgmma");
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

// ---- on the tensor cores ----

using oracle::kGpu;

TEST(GdnOutput, TensorCoresMakeTheChainTheRecurrence) {
  BITTERN_NEEDS_CUDA();
  if (!oracle::select_wgmma<Op>(oracle::wgmma_desc(64, 1, 1))) GTEST_SKIP();
  for (const StateLayout layout : {StateLayout::key_value, StateLayout::value_key}) {
    GdnDesc d = oracle::wgmma_desc(200, 1, 2);
    d.state_layout = layout;
    d.a_element = DType::bf16;
    const Chain r = run_chain(d, 0.5, 0.05, 2, Preference::fastest);
    EXPECT_LE(oracle::rms_ratio(r.o, r.want.o), 0.006);
    EXPECT_LE(oracle::rms_ratio(r.final_state, r.want.final_state), 0.006);
  }
}

oracle::Problem<Op> wgmma_problem(const GdnDesc& d, const oracle::Layout& layout = {}) {
  auto p = make_problem<Op>(d, 11, layout);
  oracle::Rng rng(12);
  for (const ConstView& x : {p.args.q, p.args.k}) oracle::fill_keys(d, x, 0.5, rng);
  for (const ConstView& x : {p.args.v_new, p.args.h}) oracle::fill_normal(x, rng);
  for (std::int64_t i = 0; i < p.args.g.shape.numel(); ++i)
    oracle::put(p.args.g, i, -0.1 * static_cast<double>(i / d.value_heads % 64));
  return p;
}

// A NaN of a token is in its own output and in later ones of its chunk, and nowhere else, though
// the tensor cores multiply it by zeros; the same of an infinity. Strong decays give no NaN.
TEST(GdnOutput, TensorCoresPutNonFiniteValuesWhereTheyBelong) {
  BITTERN_NEEDS_CUDA();
  const GdnDesc d = oracle::wgmma_desc(130, 1, 2);
  if (!oracle::select_wgmma<Op>(d)) GTEST_SKIP();
  auto want = wgmma_problem(d), got = wgmma_problem(d);
  for (auto* p : {&want, &got}) {
    oracle::put(p->args.v_new, (20 * 2 + 0) * 128 + 5, NAN);
    oracle::put(p->args.v_new, (70 * 2 + 1) * 128 + 6, INFINITY);
    for (std::int64_t t = 100; t < 128; ++t) oracle::put(p->args.g, t * 2, -1e4);
  }
  oracle::expect_ok(run_problem(want, "ref"));
  oracle::expect_ok(oracle::run_wgmma(got));
  const auto wanted = values(want.args.o), gotten = values(got.args.o);
  std::size_t odd = 0;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    if (std::isfinite(wanted[i])) {
      EXPECT_NEAR(gotten[i], wanted[i], 0.02 * (1 + std::fabs(wanted[i]))) << i;
    } else {
      EXPECT_TRUE(std::isnan(wanted[i]) ? std::isnan(gotten[i]) : gotten[i] == wanted[i]) << i;
      ++odd;
    }
  }
  EXPECT_EQ(odd, std::size_t{(64 - 20) + (128 - 70)});
}

TEST(GdnOutput, TensorCoresRefuseWhatTheyCannotDo) {
  BITTERN_NEEDS_CUDA();
  GdnDesc d = oracle::wgmma_desc(64, 1, 1);
  const auto plan = oracle::select_wgmma<Op>(d);
  if (!plan) GTEST_SKIP();
  EXPECT_EQ(plan->precision_guarantee().error_norm, ErrorNorm::terms);
  EXPECT_EQ(plan->precision_guarantee().error_bound, 0x1p-8 + 0x1p-13);
  EXPECT_TRUE(plan->precision_guarantee().deterministic);
  auto unaligned = wgmma_problem(d, {.unaligned = true});
  oracle::expect_error(oracle::run_wgmma(unaligned), Code::unsupported,
                       "gdn_output: q: address is 2 bytes past a multiple of 16, expected a "
                       "multiple of 16 for kernel cuda_wgmma");
  EXPECT_EQ(Plan<Op>::select(d, kGpu, Preference::fastest)->sku().kernel, "cuda_wgmma");
  EXPECT_EQ(Plan<Op>::select(d, kGpu)->sku().kernel, "cuda");
  d.value_dim = 96;
  oracle::expect_error(oracle::select_wgmma<Op>(d).status(), Code::unsupported,
                       "gdn_output: no kernel on cuda:0 named cuda_wgmma: cuda_wgmma: value_dim: "
                       "96, expected a multiple of 64;");
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
