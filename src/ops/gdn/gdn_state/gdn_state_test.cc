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
