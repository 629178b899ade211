#include <gtest/gtest.h>

#include <cstring>

#include "cpu/bf16.h"
#include "cuda/plugin.h"
#include "ops/gdn/gdn_test.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using Op = GdnChunkForward;
using oracle::get;
using oracle::kGpu;
using oracle::make_problem;
using oracle::put;
using oracle::run_problem;
using oracle::run_wgmma;
using oracle::select_wgmma;
using oracle::values;
using oracle::wgmma_desc;
using Problem = oracle::Problem<Op>;

TEST(GdnChunkForward, MatchesRefEverywhere) { oracle::expect_parity("gdn_chunk_forward"); }

TEST(GdnChunkForward, MatchesAnExampleWorkedByHand) {
  GdnDesc d{.tokens = 2, .key_dim = 1, .value_dim = 1, .chunk = 16};
  d.scale = 0.5;
  for (const std::string_view kernel : oracle::kBothKernels) {
    auto p = make_problem<Op>(d, 1, {});
    oracle::set_values(p.args.q, {2, 4});
    oracle::set_values(p.args.k, {1, 3});
    oracle::set_values(p.args.v, {10, 20});
    oracle::set_values(p.args.g, {0, 0});
    oracle::set_values(p.args.beta, {0.5, 2});
    oracle::set_values(p.args.initial_state, {4});
    oracle::set_values(p.args.mask, {1, 1});
    oracle::expect_ok(run_problem(p, kernel));
    // S = 4; + 1 * 0.5 (10 - 4) = 7, o = 0.5 * 2 * 7; then + 3 * 2 (20 - 21) = 1, o = 0.5 * 4 * 1
    EXPECT_EQ(values(p.args.o), (std::vector<double>{7, 2})) << kernel;
    EXPECT_EQ(values(p.args.final_state), (std::vector<double>{1})) << kernel;
    // The second token forgets all that was: S = 3 * 2 * 20.
    oracle::set_values(p.args.g, {0, -1e4});
    oracle::expect_ok(run_problem(p, kernel));
    EXPECT_EQ(values(p.args.o), (std::vector<double>{7, 240})) << kernel;
    EXPECT_EQ(values(p.args.final_state), (std::vector<double>{120})) << kernel;
    // Masked, it changes nothing.
    put(p.args.mask, 1, 0);
    put(p.args.k, 1, NAN);
    put(p.args.beta, 1, NAN);
    oracle::expect_ok(run_problem(p, kernel));
    EXPECT_EQ(values(p.args.o), (std::vector<double>{7, 0})) << kernel;
    EXPECT_EQ(values(p.args.final_state), (std::vector<double>{7})) << kernel;
  }
}

// Inputs as a model has them. `common`: how much keys have in common; `decay`: the mean of -g.
Problem model_problem(const GdnDesc& d, double common, double decay, double most_beta,
                      std::uint64_t seed) {
  Problem p = make_problem<Op>(d, seed, {});
  oracle::Rng rng(seed);
  oracle::fill_keys(d, p.args.q, 0, rng);
  oracle::fill_keys(d, p.args.k, common, rng);
  oracle::fill_normal(p.args.v, rng);
  oracle::fill_uniform(p.args.beta, 0, most_beta, rng);
  oracle::fill_uniform(p.args.g, -2 * decay, 0, rng);
  oracle::fill_normal(p.args.initial_state, rng);
  oracle::set_all(p.args.mask, 1);
  return p;
}

oracle::GdnResult recurrence(const Problem& p) {
  const oracle::GdnValues x{
      values(p.args.q),    values(p.args.k),
      values(p.args.v),    values(p.args.g),
      values(p.args.beta), oracle::keys_first(p.desc, values(p.args.initial_state)),
  };
  return oracle::gdn_recurrence(p.desc, oracle::gdn_starts(p.desc, p.args.cu_seqlens), x);
}

void expect_recurrence(Problem& p, const oracle::GdnResult& want, double most_nmse,
                       const std::string& what) {
  oracle::expect_ok(run_problem(p));
  EXPECT_LE(oracle::nmse(values(p.args.o), want.o), most_nmse) << what;
  const auto states = oracle::keys_first(p.desc, values(p.args.final_state));
  EXPECT_LE(oracle::nmse(states, want.final_state), most_nmse) << what;
}

TEST(GdnChunkForward, IsTheRecurrenceInF32) {
  for (const std::int32_t chunk : {16, 32, 64}) {
    for (const double decay : {0.0, 0.05, 1.0, 10.0, 1e4}) {
      for (const std::int64_t tokens : {1, 64, 133}) {
        GdnDesc d{.batch = 2, .tokens = tokens, .key_heads = 2, .value_heads = 6};
        d.key_dim = 32;
        d.value_dim = 40;
        d.chunk = chunk;
        if (chunk == 32) d.state_layout = StateLayout::value_key;
        if (tokens == 133) d.head_map = HeadMap::tiled;
        Problem p = model_problem(d, 0.5, decay, tokens == 64 ? 2 : 1, 1);
        expect_recurrence(
            p, recurrence(p), 1e-7 / 4,
            std::to_string(chunk) + " " + std::to_string(decay) + " " + std::to_string(tokens));
      }
    }
  }
}

TEST(GdnChunkForward, IsTheRecurrenceInBf16) {
  for (const double common : {0.0, 0.9}) {
    for (const double decay : {0.0, 0.05, 1.0}) {
      GdnDesc d{.tokens = 512, .key_heads = 1, .value_heads = 2};
      d.element = DType::bf16;
      Problem p = model_problem(d, common, decay, 1, 2);
      const double bound = common == 0 ? 0.005 : 0.01;
      expect_recurrence(p, recurrence(p), bound * bound,
                        std::to_string(common) + " " + std::to_string(decay));
    }
  }
}

Status run_bf16(Problem& p) { return run_problem(p, "cpu_bf16", Preference::fastest); }

// The bars of the exact kernel in bf16, also with decays that forget within a chunk.
TEST(GdnChunkForward, IsTheRecurrenceWithBf16Products) {
  if (!cpu::has_bf16()) GTEST_SKIP() << cpu::bf16_supported().message();
  for (const double common : {0.0, 0.9}) {
    for (const double decay : {0.0, 0.05, 1.0, 10.0, 1e4}) {
      GdnDesc d{.tokens = 512, .key_heads = 1, .value_heads = 2};
      d.element = DType::bf16;
      Problem p = model_problem(d, common, decay, 1, 2);
      const auto want = recurrence(p);
      oracle::expect_ok(run_bf16(p));
      const double bound = common == 0 ? 0.005 : 0.01;
      EXPECT_LE(oracle::nmse(values(p.args.o), want.o), bound * bound) << common << " " << decay;
      EXPECT_LE(oracle::nmse(values(p.args.final_state), want.final_state), bound * bound)
          << common << " " << decay;
    }
  }
}

TEST(GdnChunkForward, Bf16ProductsAreForTheFastestPreference) {
  GdnDesc d{.tokens = 64};
  const auto refused = Plan<Op>::select(d, {}, Preference::fastest, "cpu_bf16");
  oracle::expect_error(refused.status(), Code::unsupported,
                       "gdn_chunk_forward: no kernel on cpu named cpu_bf16: cpu_bf16: element: "
                       "f32, expected bf16;");
  d.element = DType::bf16;
  EXPECT_NE(Plan<Op>::select(d)->sku().kernel, "cpu_bf16");
  if (!cpu::has_bf16()) GTEST_SKIP() << cpu::bf16_supported().message();
  const auto fastest = Plan<Op>::select(d, {}, Preference::fastest);
  ASSERT_TRUE(fastest.ok());
  EXPECT_EQ(fastest->sku().kernel, "cpu_bf16");
  EXPECT_EQ(fastest->precision_guarantee().error_norm, ErrorNorm::terms);
  EXPECT_EQ(fastest->precision_guarantee().error_bound, 0x1.08p-7);
}

// A NaN reaches no token before its own, in whatever tile that is.
TEST(GdnChunkForward, Bf16ProductsKeepNanFromEarlierTokens) {
  if (!cpu::has_bf16()) GTEST_SKIP() << cpu::bf16_supported().message();
  GdnDesc d{.tokens = 70, .key_dim = 16, .value_dim = 16};
  d.element = DType::bf16;
  Problem clean = model_problem(d, 0.5, 0.1, 1, 9);
  oracle::expect_ok(run_bf16(clean));
  for (const std::int64_t token : {0, 1, 7, 8, 13, 63, 65}) {
    Problem p = model_problem(d, 0.5, 0.1, 1, 9);
    put(p.args.k, token * 16 + 3, NAN);
    oracle::expect_ok(run_bf16(p));
    for (std::int64_t i = 0; i < 70 * 16; ++i) {
      if (i / 16 < token) {
        EXPECT_EQ(get(p.args.o, i), get(clean.args.o, i)) << token << " " << i;
      } else {
        EXPECT_TRUE(std::isnan(get(p.args.o, i))) << token << " " << i;
      }
    }
  }
}

// llama.cpp's bar and its inputs: NMSE 1e-7, g in (-20, 0), v in (-0.3, 5).
TEST(GdnChunkForward, MeetsTheBarOfPeers) {
  GdnDesc d{.tokens = 256, .key_heads = 1, .value_heads = 2};
  Problem p = model_problem(d, 0, 0, 1, 3);
  oracle::Rng rng(4);
  oracle::fill_uniform(p.args.g, -20, -1e-4, rng);
  oracle::fill_uniform(p.args.v, -0.3, 5, rng);
  expect_recurrence(p, recurrence(p), 1e-7, "");
}

TEST(GdnChunkForward, FusedPiecesAreTheirFormulas) {
  GdnDesc d{.tokens = 100, .key_heads = 1, .value_heads = 3, .key_dim = 24, .value_dim = 16};
  d.qk_l2norm = d.gate = d.beta_sigmoid = d.allow_neg_eigval = true;
  Problem p = model_problem(d, 0.3, 0, 1, 5);
  oracle::Rng rng(6);
  for (const ConstView& x : {p.args.q, p.args.k, p.args.g, p.args.beta})
    oracle::fill_normal(x, rng);
  oracle::fill_uniform(p.args.a_log, -2, 1, rng);
  oracle::fill_normal(p.args.dt_bias, rng);
  oracle::GdnValues x{values(p.args.q), values(p.args.k),    values(p.args.v),
                      values(p.args.g), values(p.args.beta), values(p.args.initial_state)};
  for (auto* keys : {&x.q, &x.k}) {
    for (std::size_t i = 0; i < keys->size(); i += 24) {
      double squares = 1e-6;
      for (std::size_t j = i; j < i + 24; ++j) squares += (*keys)[j] * (*keys)[j];
      for (std::size_t j = i; j < i + 24; ++j) (*keys)[j] /= std::sqrt(squares);
    }
  }
  for (std::size_t i = 0; i < x.g.size(); ++i) {
    const auto h = static_cast<std::int64_t>(i % 3);
    x.g[i] =
        -std::exp(get(p.args.a_log, h)) * std::log1p(std::exp(x.g[i] + get(p.args.dt_bias, h)));
    x.beta[i] = 2 / (1 + std::exp(-x.beta[i]));
  }
  expect_recurrence(p, oracle::gdn_recurrence(d, {0, 100}, x), 1e-9, "");
}

TEST(GdnChunkForward, ExtremesGiveNoNan) {
  for (const std::int64_t tokens : {1, 70}) {
    GdnDesc d{.tokens = tokens, .key_heads = 1, .value_heads = 2, .key_dim = 16, .value_dim = 16};
    Problem p = model_problem(d, 0.99, 0, 2, 7);
    for (std::int64_t i = 0; i < tokens * 2; ++i) {
      put(p.args.g, i, i % 3 == 0 ? -1e4 : -1e-3);
      put(p.args.beta, i, 2);
    }
    oracle::expect_ok(run_problem(p));
    for (const double o : values(p.args.o)) EXPECT_TRUE(std::isfinite(o));
    for (const double s : values(p.args.final_state)) EXPECT_TRUE(std::isfinite(s));
  }
}

constexpr double kMost = 3.4028234663852886e38;
constexpr double kStrong[] = {-15, -1e4, -1e6, -1e30, -kMost, -HUGE_VAL};

// e^(G[i] - G[j]) itself: head j writes 1 at token j, and nothing else; o shows what is left of it.
TEST(GdnChunkForward, DecaysAreRightWhateverTheOthersAre) {
  for (const std::string_view kernel : oracle::kBothKernels) {
    for (const std::int32_t chunk : {16, 32, 64}) {
      for (const double strong : kStrong) {
        for (const double mild : {0.3, 5.0, -0.5}) {  // the last one grows
          GdnDesc d{.tokens = chunk, .value_heads = chunk, .key_dim = 1, .value_dim = 1};
          d.chunk = chunk;
          d.scale = 1;
          Problem p = make_problem<Op>(d, 1, {});
          oracle::Rng rng(static_cast<std::uint64_t>(chunk));
          for (const ConstView& x : {p.args.q, p.args.k, p.args.v}) oracle::set_all(x, 1);
          oracle::set_all(p.args.mask, 1);
          oracle::set_all(p.args.initial_state, 0);
          for (std::int64_t t = 0; t < chunk; ++t) {
            const double g = rng.chance(8) ? strong : -mild * rng.uniform();
            for (std::int64_t h = 0; h < chunk; ++h) {
              put(p.args.g, t * chunk + h, g);
              put(p.args.beta, t * chunk + h, t == h ? 1 : 0);
            }
          }
          oracle::expect_ok(run_problem(p, kernel));
          for (std::int64_t h = 0; h < chunk; ++h) {
            double sum = 0;
            for (std::int64_t t = 0; t < chunk; ++t) {
              if (t > h) sum += get(p.args.g, t * chunk + h);
              const double want = t < h ? 0 : std::exp(sum), got = get(p.args.o, t * chunk + h);
              EXPECT_LE(std::abs(got - want), 2e-7 * std::max(want, 0x1p-126))
                  << kernel << " " << chunk << " " << strong << " " << mild << " " << t << " " << h;
            }
            EXPECT_EQ(get(p.args.final_state, h), get(p.args.o, (chunk - 1) * chunk + h));
          }
        }
      }
    }
  }
}

// One token in 8 forgets all, or nearly; the others are as exact as without it. -infinity is a
// reset.
TEST(GdnChunkForward, StrongDecaysDoNotSpoilMildOnes) {
  for (const std::int32_t chunk : {16, 32, 64}) {
    for (const double strong : kStrong) {
      for (const bool regular : {true, false}) {
        GdnDesc d{.tokens = 150, .key_heads = 2, .value_heads = 4, .key_dim = 24, .value_dim = 20};
        d.chunk = chunk;
        if (regular) d.sequences = 3;
        Problem p = model_problem(d, 0.5, 0, 1, 11);
        if (regular) oracle::set_values(p.args.cu_seqlens, {0, 70, 70, 150});
        oracle::Rng rng(12);
        oracle::fill_strong(p.args.g, d.value_heads, strong, regular, rng);
        const auto want = recurrence(p);
        const auto what = std::to_string(chunk) + " " + std::to_string(strong);
        oracle::expect_ok(run_problem(p));
        EXPECT_LE(oracle::worst_row(values(p.args.o), want.o, d.value_dim), 2e-5) << what;
        EXPECT_LE(oracle::rms_ratio(values(p.args.o), want.o), 1e-6) << what;
        EXPECT_LE(oracle::rms_ratio(values(p.args.final_state), want.final_state), 1e-6) << what;
        d.element = DType::bf16;
        Problem half = model_problem(d, 0.5, 0, 1, 11);
        if (regular) oracle::set_values(half.args.cu_seqlens, {0, 70, 70, 150});
        oracle::set_values(half.args.g, values(p.args.g));
        const auto want_half = recurrence(half);
        oracle::expect_ok(run_problem(half));
        EXPECT_LE(oracle::rms_ratio(values(half.args.o), want_half.o), 0.003) << what;
        EXPECT_LE(oracle::rms_ratio(values(half.args.final_state), want_half.final_state), 1e-6)
            << what;
      }
    }
  }
}

// A reset by the gate, of a masked token (which is none), and of tokens that follow each other; the
// step form gives the same.
TEST(GdnChunkForward, ResetsAreThoseOfTheStepForm) {
  GdnDesc d{.tokens = 80, .key_heads = 1, .value_heads = 2, .key_dim = 16, .value_dim = 16};
  d.gate = true;
  Problem p = model_problem(d, 0.5, 0, 1, 13);
  oracle::Rng rng(14);
  oracle::fill_normal(p.args.g, rng);
  oracle::set_all(p.args.a_log, 0);
  oracle::set_all(p.args.dt_bias, 0);
  for (const std::int64_t t : {0, 9, 10, 63, 64, 70})
    for (std::int64_t h = 0; h < 2; ++h) put(p.args.g, t * 2 + h, t == 9 ? 3e38 : HUGE_VAL);
  oracle::GdnValues x{values(p.args.q), values(p.args.k),    values(p.args.v),
                      values(p.args.g), values(p.args.beta), values(p.args.initial_state)};
  for (double& g : x.g) g = g > 20 ? -g : -std::log1p(std::exp(g));
  expect_recurrence(p, oracle::gdn_recurrence(d, {0, 80}, x), 1e-12, "");

  oracle::Problem<GdnRecurrentStep> step = oracle::make_problem<GdnRecurrentStep>({.batch = 1,
                                                                                   .tokens = 80,
                                                                                   .key_heads = 1,
                                                                                   .value_heads = 2,
                                                                                   .key_dim = 16,
                                                                                   .value_dim = 16,
                                                                                   .gate = true},
                                                                                  1, {});
  oracle::set_values(step.args.q, values(p.args.q));
  oracle::set_values(step.args.k, values(p.args.k));
  oracle::set_values(step.args.v, values(p.args.v));
  oracle::set_values(step.args.g, values(p.args.g));
  oracle::set_values(step.args.beta, values(p.args.beta));
  oracle::set_values(step.args.a_log, values(p.args.a_log));
  oracle::set_values(step.args.dt_bias, values(p.args.dt_bias));
  oracle::set_values(step.args.state, values(p.args.initial_state));
  oracle::expect_ok(run_problem(step));
  EXPECT_LE(oracle::rms_ratio(values(p.args.o), values(step.args.o)), 1e-6);

  for (std::int64_t t = 60; t < 80; ++t) put(p.args.mask, t, t == 63 || t == 64 ? 0 : 1);
  for (const std::size_t t : {63u, 64u})
    for (std::size_t h = 0; h < 2; ++h) x.g[t * 2 + h] = x.beta[t * 2 + h] = 0;
  oracle::expect_ok(run_problem(p));
  const auto want = oracle::gdn_recurrence(d, {0, 80}, x);
  EXPECT_LE(oracle::rms_ratio(values(p.args.final_state), want.final_state), 1e-6);
}

std::vector<std::byte> bytes_of(const MutView& v, std::int64_t first, std::int64_t count) {
  const auto* at =
      static_cast<const std::byte*>(v.data) + static_cast<std::size_t>(first) * size_of(v.dtype);
  return {at, at + static_cast<std::size_t>(count) * size_of(v.dtype)};
}

// Packed sequences give the bits that each gives alone, and those they give when all the others are
// NaN.
TEST(GdnChunkForward, SequencesDoNotMeet) {
  const std::vector<double> starts = {0, 0, 20, 21, 21, 85, 150, 150};
  for (const DType element : {DType::f32, DType::bf16}) {
    GdnDesc d{.tokens = 150, .key_heads = 1, .value_heads = 3, .key_dim = 20, .value_dim = 12};
    d.element = element;
    d.chunk = 32;
    d.sequences = 7;
    Problem packed = model_problem(d, 0.5, 0.1, 1, 8);
    oracle::set_values(packed.args.cu_seqlens, starts);
    oracle::expect_ok(run_problem(packed));
    const std::int64_t value_row = 36, key_row = 20, state = 3 * 20 * 12;
    for (std::size_t n = 0; n + 1 < starts.size(); ++n) {
      const auto first = static_cast<std::int64_t>(starts[n]);
      const auto count = static_cast<std::int64_t>(starts[n + 1]) - first;
      const auto expect_same = [&](const Problem& other, std::int64_t other_first,
                                   std::int64_t other_n) {
        EXPECT_EQ(bytes_of(other.args.o, other_first * value_row, count * value_row),
                  bytes_of(packed.args.o, first * value_row, count * value_row));
        EXPECT_EQ(bytes_of(other.args.final_state, other_n * state, state),
                  bytes_of(packed.args.final_state, static_cast<std::int64_t>(n) * state, state));
      };
      GdnDesc one = d;
      one.sequences = 0;
      one.tokens = count;
      Problem alone = make_problem<Op>(one, 8, {});
      const auto copy = [&](const ConstView& from, const ConstView& to, std::int64_t offset) {
        for (std::int64_t i = 0; i < to.shape.numel(); ++i) put(to, i, get(from, offset + i));
      };
      copy(packed.args.q, alone.args.q, first * key_row);
      copy(packed.args.k, alone.args.k, first * key_row);
      copy(packed.args.v, alone.args.v, first * value_row);
      copy(packed.args.g, alone.args.g, first * 3);
      copy(packed.args.beta, alone.args.beta, first * 3);
      copy(packed.args.initial_state, alone.args.initial_state,
           static_cast<std::int64_t>(n) * state);
      oracle::set_all(alone.args.mask, 1);
      if (count > 0) {
        oracle::expect_ok(run_problem(alone));
        expect_same(alone, 0, 0);
      }
      Problem poisoned = model_problem(d, 0.5, 0.1, 1, 8);
      oracle::set_values(poisoned.args.cu_seqlens, starts);
      const auto poison = [&](const ConstView& x, std::int64_t row) {
        for (std::int64_t i = 0; i < x.shape.numel(); ++i)
          if (i < first * row || i >= (first + count) * row) put(x, i, NAN);
      };
      poison(poisoned.args.q, key_row);
      poison(poisoned.args.k, key_row);
      poison(poisoned.args.v, value_row);
      poison(poisoned.args.g, 3);
      poison(poisoned.args.beta, 3);
      for (std::int64_t i = 0; i < 7 * state; ++i)
        if (i / state != static_cast<std::int64_t>(n)) put(poisoned.args.initial_state, i, NAN);
      oracle::expect_ok(run_problem(poisoned));
      expect_same(poisoned, first, static_cast<std::int64_t>(n));
    }
  }
}

// A NaN reaches later tokens of its head alone.
TEST(GdnChunkForward, TheFutureIsNotSeen) {
  GdnDesc d{.tokens = 90, .key_heads = 3, .value_heads = 3, .key_dim = 10, .value_dim = 10};
  Problem clean = model_problem(d, 0.5, 0.1, 1, 9);
  oracle::expect_ok(run_problem(clean));
  for (const std::int64_t at : {0, 37, 64, 89}) {
    Problem p = model_problem(d, 0.5, 0.1, 1, 9);
    for (const ConstView& x : {p.args.q, p.args.k, p.args.v}) put(x, (at * 3 + 1) * 10 + 4, NAN);
    put(p.args.g, at * 3 + 1, NAN);
    oracle::expect_ok(run_problem(p));
    for (std::int64_t i = 0; i < 90 * 30; ++i) {
      if (i / 30 >= at && i / 10 % 3 == 1) {
        EXPECT_TRUE(std::isnan(get(p.args.o, i)));
      } else {
        EXPECT_EQ(get(p.args.o, i), get(clean.args.o, i)) << i;
      }
    }
  }
}

// Masked tokens are as good as absent, wherever they are.
TEST(GdnChunkForward, MaskedTokensAreAbsent) {
  GdnDesc d{.tokens = 100, .key_dim = 16, .value_dim = 16};
  Problem p = model_problem(d, 0.5, 0.1, 1, 10);
  oracle::GdnValues kept;
  kept.initial_state = values(p.args.initial_state);
  std::vector<std::int64_t> left;
  for (std::int64_t t = 0; t < 100; ++t) {
    const bool masked = t < 5 || t % 7 == 3;
    put(p.args.mask, t, masked ? 0 : 1);
    if (masked) {
      put(p.args.g, t, NAN);
      put(p.args.q, t * 16, NAN);
      put(p.args.v, t * 16 + 3, NAN);
      continue;
    }
    left.push_back(t);
    for (std::int64_t c = 0; c < 16; ++c) {
      kept.q.push_back(get(p.args.q, t * 16 + c));
      kept.k.push_back(get(p.args.k, t * 16 + c));
      kept.v.push_back(get(p.args.v, t * 16 + c));
    }
    kept.g.push_back(get(p.args.g, t));
    kept.beta.push_back(get(p.args.beta, t));
  }
  oracle::expect_ok(run_problem(p));
  const auto want = oracle::gdn_recurrence(d, {0, static_cast<std::int64_t>(left.size())}, kept);
  std::vector<double> got;
  for (std::int64_t t = 0; t < 100; ++t) {
    for (std::int64_t c = 0; c < 16; ++c) {
      if (std::find(left.begin(), left.end(), t) == left.end()) {
        EXPECT_EQ(get(p.args.o, t * 16 + c), 0);
      } else {
        got.push_back(get(p.args.o, t * 16 + c));
      }
    }
  }
  EXPECT_LE(oracle::nmse(got, want.o), 1e-9);
  EXPECT_LE(oracle::nmse(values(p.args.final_state), want.final_state), 1e-9);
}

// ---- on tensor cores ----

// No further from the recurrence than FLA's roundings are: emulated, they come to 0.0044 to 0.0047
// of o where nothing decays.
TEST(GdnChunkForward, TensorCoresAreCloseToTheRecurrence) {
  BITTERN_NEEDS_CUDA();
  if (!select_wgmma<Op>(wgmma_desc(64, 1, 1))) GTEST_SKIP() << "no products of a warpgroup";
  for (const double common : {0.0, 0.9}) {
    for (const double decay : {0.0, 0.05, 10.0}) {
      GdnDesc d = wgmma_desc(330, 1, 2);
      if (decay == 10.0) d.element = DType::f16;
      Problem p = model_problem(d, common, decay, 1, 2);
      const auto want = recurrence(p);
      oracle::expect_ok(run_wgmma(p));
      const double bound = common == 0 ? 0.0045 : 0.006;
      EXPECT_LE(oracle::rms_ratio(values(p.args.o), want.o), bound) << common << " " << decay;
      EXPECT_LE(oracle::rms_ratio(values(p.args.final_state), want.final_state), bound)
          << common << " " << decay;
    }
  }
}

// One token in 8 forgets all, or nearly; the others are as close as without it.
TEST(GdnChunkForward, TensorCoresKeepMildDecaysBesideStrongOnes) {
  BITTERN_NEEDS_CUDA();
  if (!select_wgmma<Op>(wgmma_desc(64, 1, 1))) GTEST_SKIP() << "no products of a warpgroup";
  for (const double strong : {-15.0, -1e4, -HUGE_VAL}) {
    GdnDesc d = wgmma_desc(270, 1, 2);
    d.sequences = 3;
    Problem p = model_problem(d, 0.5, 0, 1, 11);
    oracle::set_values(p.args.cu_seqlens, {0, 70, 70, 270});
    oracle::Rng rng(12);
    oracle::fill_strong(p.args.g, d.value_heads, strong, true, rng);
    const auto want = recurrence(p);
    oracle::expect_ok(run_wgmma(p));
    EXPECT_LE(oracle::rms_ratio(values(p.args.o), want.o), 0.006) << strong;
    EXPECT_LE(oracle::rms_ratio(values(p.args.final_state), want.final_state), 0.006) << strong;
  }
}

// A NaN reaches no token before its own, of a value only that value, and of a masked token nothing.
TEST(GdnChunkForward, TensorCoresKeepNanFromEarlierTokens) {
  BITTERN_NEEDS_CUDA();
  const GdnDesc d = wgmma_desc(210, 1, 2);
  if (!select_wgmma<Op>(d)) GTEST_SKIP() << "no products of a warpgroup";
  Problem clean = model_problem(d, 0.5, 0.1, 1, 9);
  oracle::expect_ok(run_wgmma(clean));
  const auto expect_nan = [&](const Problem& p, auto&& nan) {
    for (std::int64_t i = 0; i < 210 * 2 * 128; ++i) {
      if (nan(i / 256, i / 128 % 2, i % 128)) {
        EXPECT_TRUE(std::isnan(get(p.args.o, i))) << i;
      } else {
        EXPECT_EQ(get(p.args.o, i), get(clean.args.o, i)) << i;
      }
    }
  };
  for (const std::int64_t at : {0, 21, 64, 127, 209}) {
    Problem keys = model_problem(d, 0.5, 0.1, 1, 9);
    put(keys.args.k, at * 128 + 3, NAN);
    oracle::expect_ok(run_wgmma(keys));
    expect_nan(keys, [&](std::int64_t t, std::int64_t, std::int64_t) { return t >= at; });
    Problem others = model_problem(d, 0.5, 0.1, 1, 9);
    put(others.args.v, (at * 2 + 1) * 128 + 77, NAN);
    put(others.args.g, at * 2, NAN);
    oracle::expect_ok(run_wgmma(others));
    expect_nan(others, [&](std::int64_t t, std::int64_t h, std::int64_t c) {
      return t >= at && (h == 0 || c == 77);
    });
  }
  put(clean.args.mask, 40, 0);
  oracle::expect_ok(run_wgmma(clean));
  Problem masked = model_problem(d, 0.5, 0.1, 1, 9);
  put(masked.args.mask, 40, 0);
  put(masked.args.k, 40 * 128, NAN);
  put(masked.args.q, 40 * 128, NAN);
  put(masked.args.v, 40 * 256 + 5, NAN);
  put(masked.args.g, 80, NAN);
  oracle::expect_ok(run_wgmma(masked));
  expect_nan(masked, [](std::int64_t, std::int64_t, std::int64_t) { return false; });
}

// A sequence alone is cut into segments where there are multiprocessors for them; beside enough
// copies of itself it is not (on the emulated device: with BITTERN_EMULATED_MULTIPROCESSORS).
TEST(GdnChunkForward, TensorCoresGiveSegmentsTheirStates) {
  BITTERN_NEEDS_CUDA();
  if (!select_wgmma<Op>(wgmma_desc(64, 1, 1))) GTEST_SKIP() << "no products of a warpgroup";
  CudaDeviceInfo device;
  oracle::expect_ok((*cuda_plugin(0))->info(0, &device));
  for (const double decay : {0.0, 0.01, 10.0}) {
    GdnDesc d = wgmma_desc(device.name == "emulated" ? 330 : 3330, 1, 1);
    Problem alone = model_problem(d, 0.9, decay, 1, 13);
    const auto want = recurrence(alone);
    oracle::expect_ok(run_wgmma(alone));
    d.batch = device.multiprocessors / 6 + 1;
    Problem beside = model_problem(d, 0.9, decay, 1, 13);
    const auto repeat = [](const ConstView& to, const ConstView& from) {
      for (std::int64_t i = 0; i < to.shape.numel(); ++i)
        put(to, i, get(from, i % from.shape.numel()));
    };
    repeat(beside.args.q, alone.args.q);
    repeat(beside.args.k, alone.args.k);
    repeat(beside.args.v, alone.args.v);
    repeat(beside.args.g, alone.args.g);
    repeat(beside.args.beta, alone.args.beta);
    repeat(beside.args.initial_state, alone.args.initial_state);
    oracle::expect_ok(run_wgmma(beside));
    const auto compare = [&](const MutView& one, const MutView& all, std::vector<double> exact) {
      const std::vector<double> got = values(one);
      std::vector<double> plain = values(all);
      plain.resize(got.size());
      const double error = oracle::rms_ratio(got, exact);
      EXPECT_LE(error, 0.006) << decay;
      EXPECT_LE(error, 1.15 * oracle::rms_ratio(plain, exact)) << decay;
      EXPECT_LE(oracle::rms_ratio(got, plain), 0.006) << decay;
    };
    compare(alone.args.o, beside.args.o, want.o);
    compare(alone.args.final_state, beside.args.final_state, want.final_state);
    const auto o = values(alone.args.o), state = values(alone.args.final_state);
    oracle::expect_ok(run_wgmma(alone));
    EXPECT_EQ(values(alone.args.o), o);
    EXPECT_EQ(values(alone.args.final_state), state);
  }
}

// Keys and values of all sizes, with segments or without, in a few heads and in many.
TEST(GdnChunkForward, TensorCoresTakeOtherSizes) {
  BITTERN_NEEDS_CUDA();
  if (!select_wgmma<Op>(wgmma_desc(64, 1, 1))) GTEST_SKIP() << "no products of a warpgroup";
  for (const GdnDesc& d : oracle::wgmma_sizes()) {
    Problem p = model_problem(d, 0.5, 0.05, 1, 21);
    const auto want = recurrence(p);
    oracle::expect_ok(run_wgmma(p));
    EXPECT_LE(oracle::rms_ratio(values(p.args.o), want.o), 0.006) << oracle::sizes_text(d);
    EXPECT_LE(
        oracle::rms_ratio(oracle::keys_first(d, values(p.args.final_state)), want.final_state),
        0.006)
        << oracle::sizes_text(d);
  }
}

TEST(GdnChunkForward, TensorCoresAreForTheFastestPreference) {
  BITTERN_NEEDS_CUDA();
  const GdnDesc d = wgmma_desc(64, 1, 1);
  EXPECT_EQ(Plan<Op>::select(d, kGpu)->sku().kernel, "cuda");
  const auto plan = select_wgmma<Op>(d);
  if (!plan) GTEST_SKIP() << plan.status().message();
  EXPECT_EQ(Plan<Op>::select(d, kGpu, Preference::fastest)->sku().kernel, "cuda_wgmma");
  EXPECT_EQ(plan->precision_guarantee().error_bound, 0x1.1p-7);
  EXPECT_GT(plan->workspace_bytes(), 0u);
  for (const auto& [wrong, message] :
       {std::pair{GdnDesc{.tokens = 64}, "element: f32, expected bf16 or f16;"},
        std::pair{GdnDesc{.tokens = 64, .key_dim = 256, .element = DType::bf16},
                  "key_dim: 256, expected 64 or 128;"},
        std::pair{GdnDesc{.tokens = 64, .value_dim = 96, .element = DType::bf16},
                  "value_dim: 96, expected a multiple of 64;"},
        std::pair{GdnDesc{.tokens = 64, .chunk = 32, .element = DType::f16},
                  "chunk: 32, expected 64;"}}) {
    oracle::expect_error(
        select_wgmma<Op>(wrong).status(), Code::unsupported,
        std::string("gdn_chunk_forward: no kernel on cuda:0 named cuda_wgmma: cuda_wgmma: ") +
            message);
  }
  auto unaligned = make_problem<Op>(d, 1, {.unaligned = true});
  oracle::expect_error(run_wgmma(unaligned), Code::unsupported,
                       "gdn_chunk_forward: q: address is 2 bytes past a multiple of 16, expected a "
                       "multiple of 16 for kernel cuda_wgmma");
}

TEST(GdnChunkForward, RefusesWhatItCannotDo) {
  using enum Code;
  const auto refuse = [](const GdnDesc& d, Code code, std::string_view message) {
    oracle::expect_error(Plan<Op>::select(d).status(), code, message);
  };
  refuse({.key_heads = 0}, invalid_argument,
         "gdn_chunk_forward: key_heads: 0, expected at least 1");
  refuse({.allow_neg_eigval = true}, invalid_argument,
         "gdn_chunk_forward: allow_neg_eigval: true, expected false without beta_sigmoid");
  refuse({.chunk = 128}, invalid_argument, "gdn_chunk_forward: chunk: 128, expected 16, 32 or 64");
  refuse({.batch = 3, .sequences = 2}, invalid_argument,
         "gdn_chunk_forward: batch: 3, expected 1 with sequences");
  GdnDesc d{.tokens = 3, .gate = true};
  auto p = make_problem<Op>(d, 1, {});
  p.args.a_log = {};
  const Status status = run_problem(p);
  EXPECT_EQ(status.code(), invalid_argument);
  EXPECT_NE(status.message().find("a_log"), std::string_view::npos) << status.message();
}

}  // namespace
}  // namespace bittern
