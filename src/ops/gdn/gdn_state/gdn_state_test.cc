#include <gtest/gtest.h>

#include "ops/gdn/gdn_test.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using Op = GdnState;
using oracle::get;
using oracle::make_problem;
using oracle::put;
using oracle::run_problem;

TEST(GdnState, MatchesRefEverywhere) { oracle::expect_parity("gdn_state"); }

TEST(GdnState, MatchesAnExampleWorkedByHand) {
  const GdnDesc d{.tokens = 2, .key_dim = 2, .value_dim = 1, .chunk = 16};
  for (const std::string_view kernel : oracle::kBothKernels) {
    auto p = make_problem<Op>(d, 1, {});
    oracle::set_values(p.args.k, {1, 2, 3, 4});
    oracle::set_values(p.args.w, {1, 0, 0, 1});
    oracle::set_values(p.args.u, {10, 20});
    oracle::set_values(p.args.g, {0, 0});
    oracle::set_values(p.args.initial_state, {5, 7});
    oracle::expect_ok(run_problem(p, kernel));
    EXPECT_EQ(oracle::values(p.args.h), (std::vector<double>{5, 7}));
    EXPECT_EQ(oracle::values(p.args.v_new), (std::vector<double>{5, 13}));
    EXPECT_EQ(oracle::values(p.args.final_state), (std::vector<double>{5 + 5 + 39, 7 + 10 + 52}));
    // The second token forgets all: only what it writes is left.
    oracle::set_values(p.args.g, {0, -1e4});
    oracle::expect_ok(run_problem(p, kernel));
    EXPECT_EQ(oracle::values(p.args.final_state), (std::vector<double>{39, 52}));
  }
}

// Sequences packed, one of them empty: each begins from its own state and passes it on.
TEST(GdnState, SequencesDoNotMeet) {
  for (const StateLayout layout : {StateLayout::key_value, StateLayout::value_key}) {
    GdnDesc d{.tokens = 50, .value_heads = 2, .key_dim = 6, .value_dim = 5, .chunk = 16};
    d.sequences = 3;
    d.state_layout = layout;
    auto clean = make_problem<Op>(d, 3, {}), poisoned = make_problem<Op>(d, 3, {});
    for (auto* p : {&clean, &poisoned}) {
      oracle::set_values(p->args.cu_seqlens, {0, 20, 20, 50});
      oracle::Rng rng(9);
      for (const ConstView& x : {p->args.k, p->args.w, p->args.u, p->args.initial_state})
        oracle::fill_uniform(x, -0.5, 0.5, rng);
      oracle::set_all(p->args.g, -0.1);
    }
    for (std::int64_t t = 0; t < 20; ++t) put(poisoned.args.u, t * 10, NAN);
    oracle::expect_ok(run_problem(clean));
    oracle::expect_ok(run_problem(poisoned));
    const auto want = oracle::values(clean.args.final_state);
    const auto got = oracle::values(poisoned.args.final_state);
    const std::size_t size = 60;
    for (std::size_t i = size; i < 2 * size; ++i) {  // the empty one
      EXPECT_EQ(got[i], get(clean.args.initial_state, static_cast<std::int64_t>(i)));
    }
    for (std::size_t i = 2 * size; i < 3 * size; ++i) EXPECT_EQ(got[i], want[i]);
    EXPECT_TRUE(std::isnan(got[0]));
    // Two chunks of the first sequence, none of the second, two of the third.
    EXPECT_EQ(get(poisoned.args.h, 2 * 60), get(clean.args.initial_state, 2 * 60));
  }
}

// ---- on the tensor cores ----

using oracle::kGpu;

oracle::Problem<Op> wgmma_problem(const GdnDesc& d, const oracle::Layout& layout = {}) {
  auto p = make_problem<Op>(d, 11, layout);
  oracle::Rng rng(12);
  for (const ConstView& x : {p.args.k, p.args.w}) oracle::fill_keys(d, x, 0.5, rng);
  for (const ConstView& x : {p.args.u, p.args.initial_state}) oracle::fill_normal(x, rng);
  for (std::int64_t i = 0; i < p.args.g.shape.numel(); ++i)
    put(p.args.g, i, -0.01 * static_cast<double>(i / d.value_heads % 64 + 1));
  return p;
}

// Packed sequences of whole and ragged chunks, one of them empty, and more heads than a
// multiprocessor has blocks for: each as ref has it, and a NaN stays in its sequence and head.
TEST(GdnState, TensorCoresKeepSequencesApart) {
  BITTERN_NEEDS_CUDA();
  for (const StateLayout layout : {StateLayout::key_value, StateLayout::value_key}) {
    GdnDesc d = oracle::wgmma_desc(150, 1, 2);
    d.sequences = 4;
    d.state_layout = layout;
    if (!oracle::select_wgmma<Op>(d)) GTEST_SKIP();
    auto want = wgmma_problem(d), got = wgmma_problem(d);
    for (auto* p : {&want, &got}) {
      oracle::set_values(p->args.cu_seqlens, {0, 70, 70, 134, 150});
      put(p->args.u, 30 * 256 + 3, NAN);  // of the first sequence and head, value 3
    }
    oracle::expect_ok(run_problem(want, "ref"));
    oracle::expect_ok(oracle::run_wgmma(got));
    const auto close = [&](const char* name, const MutView& w, const MutView& g,
                           std::int64_t count) {
      for (std::int64_t i = 0; i < count; ++i) {
        const double a = get(w, i), b = get(g, i);
        ASSERT_EQ(std::isnan(a), std::isnan(b)) << name << " " << i;
        ASSERT_TRUE(std::isnan(a) || std::fabs(a - b) <= 0.02 * (1 + std::fabs(a)))
            << name << " " << i << ": " << b << ", expected " << a;
      }
    };
    const std::int64_t state = 2 * 128 * 128;
    close("h", want.args.h, got.args.h, 4 * state);
    close("v_new", want.args.v_new, got.args.v_new, 150 * 256);
    close("final_state", want.args.final_state, got.args.final_state, 4 * state);
    const auto final = oracle::values(got.args.final_state);
    EXPECT_EQ(std::count_if(final.begin(), final.end(), [](double x) { return std::isnan(x); }),
              128);
    for (std::int64_t i = state; i < 2 * state; ++i)  // the empty one
      ASSERT_EQ(get(got.args.final_state, i), get(got.args.initial_state, i));
  }
}

// With more heads than there are multiprocessors for, a block has all values of a head.
TEST(GdnState, TensorCoresTakeManyHeads) {
  BITTERN_NEEDS_CUDA();
  const GdnDesc d = oracle::wgmma_desc(70, 1, 67);
  if (!oracle::select_wgmma<Op>(d)) GTEST_SKIP();
  auto want = wgmma_problem(d), got = wgmma_problem(d);
  oracle::expect_ok(run_problem(want));
  oracle::expect_ok(oracle::run_wgmma(got));
  for (const auto& [w, g] :
       {std::pair{want.args.h, got.args.h}, std::pair{want.args.v_new, got.args.v_new},
        std::pair{want.args.final_state, got.args.final_state}})
    EXPECT_LE(oracle::rms_ratio(oracle::values(g), oracle::values(w)), 0.001);
}

// A decay of 0 forgets the state for good; -infinity as a sum would be NaN, as in ref.
TEST(GdnState, TensorCoresForget) {
  BITTERN_NEEDS_CUDA();
  const GdnDesc d = oracle::wgmma_desc(64, 1, 1);
  if (!oracle::select_wgmma<Op>(d)) GTEST_SKIP();
  auto one = wgmma_problem(d), other = wgmma_problem(d);
  for (auto* p : {&one, &other}) {
    oracle::set_all(p->args.w, 0);
    for (std::int64_t t = 40; t < 64; ++t) put(p->args.g, t, -1e4);
  }
  oracle::set_all(other.args.initial_state, 7);
  for (std::int64_t i = 0; i < 40 * 128; ++i) put(other.args.u, i, 5);
  oracle::expect_ok(oracle::run_wgmma(one));
  oracle::expect_ok(oracle::run_wgmma(other));
  EXPECT_EQ(oracle::values(one.args.final_state), oracle::values(other.args.final_state));
  EXPECT_NE(get(one.args.final_state, 0), 0);
}

TEST(GdnState, TensorCoresRefuseWhatTheyCannotDo) {
  BITTERN_NEEDS_CUDA();
  GdnDesc d = oracle::wgmma_desc(64, 1, 1);
  const auto plan = oracle::select_wgmma<Op>(d);
  if (!plan) GTEST_SKIP();
  EXPECT_EQ(plan->precision_guarantee().error_norm, ErrorNorm::terms);
  EXPECT_EQ(plan->precision_guarantee().error_bound, 0x1p-8 + 0x1p-11);
  EXPECT_TRUE(plan->precision_guarantee().deterministic);
  auto unaligned = wgmma_problem(d, {.unaligned = true});
  oracle::expect_error(oracle::run_wgmma(unaligned), Code::unsupported,
                       "gdn_state: k: address is 2 bytes past a multiple of 16, expected a "
                       "multiple of 16 for kernel cuda_wgmma");
  EXPECT_EQ(Plan<Op>::select(d, kGpu)->sku().kernel, "cuda");
  d.chunk = 32;
  oracle::expect_error(oracle::select_wgmma<Op>(d).status(), Code::unsupported,
                       "gdn_state: no kernel on cuda:0 named cuda_wgmma: cuda_wgmma: chunk: 32, "
                       "expected 64;");
}

TEST(GdnState, RefusesWhatItCannotDo) {
  oracle::expect_error(Plan<Op>::select({.value_dim = 257}).status(), Code::invalid_argument,
                       "gdn_state: value_dim: 257, expected 1..256");
  const GdnDesc d{.tokens = 3, .sequences = 2};
  auto p = make_problem<Op>(d, 1, {});
  oracle::set_values(p.args.cu_seqlens, {0, 4, 3});
  oracle::expect_error(run_problem(p), Code::invalid_argument,
                       "gdn_state: cu_seqlens: [2] is 3, expected at least [1], 4");
}

}  // namespace
}  // namespace bittern
