#include <gtest/gtest.h>

#include "cuda/plugin.h"
#include "ops/gdn/gdn_test.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using Op = GdnChunkBackward;
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

TEST(GdnChunkBackward, MatchesRefEverywhere) { oracle::expect_parity("gdn_chunk_backward"); }

// One token: o = q S, S = S0 + k beta (v - k S0), all scalars.
TEST(GdnChunkBackward, MatchesAnExampleWorkedByHand) {
  GdnDesc d{.tokens = 1, .key_dim = 1, .value_dim = 1, .chunk = 16};
  d.scale = 1;
  for (const std::string_view kernel : oracle::kBothKernels) {
    auto p = make_problem<Op>(d, 1, {});
    put(p.args.q, 0, 2);
    put(p.args.k, 0, 3);
    put(p.args.v, 0, 5);
    put(p.args.g, 0, 0);
    put(p.args.beta, 0, 0.5);
    put(p.args.initial_state, 0, 1);
    put(p.args.mask, 0, 1);
    put(p.args.d_o, 0, 1);
    put(p.args.d_final_state, 0, 10);
    oracle::expect_ok(run_problem(p, kernel));
    // S = 1 + 3 * 0.5 * (5 - 3) = 4; dS = 10 + 2 = 12
    EXPECT_EQ(get(p.args.d_q, 0), 4);
    EXPECT_EQ(get(p.args.d_v, 0), 12 * 1.5);
    EXPECT_EQ(get(p.args.d_beta, 0), 12 * 3 * 2);
    EXPECT_EQ(get(p.args.d_k, 0), 12 * 0.5 * (5 - 2 * 3));
    EXPECT_EQ(get(p.args.d_initial_state, 0), 12 * (1 - 0.5 * 9));
    EXPECT_EQ(get(p.args.d_g, 0), get(p.args.d_initial_state, 0));  // e^g S0 with S0 = 1
  }
}

// One token whose gradient of the strength is 1, so that d_beta is the slope of the sigmoid.
TEST(GdnChunkBackward, KeepsTheSlopeOfAStrengthNearOneAndZero) {
  GdnDesc d{.tokens = 1, .key_dim = 1, .value_dim = 1, .chunk = 16, .beta_sigmoid = true};
  d.scale = 1;
  for (const std::string_view kernel : oracle::kBothKernels) {
    for (const bool negative : {false, true}) {
      d.allow_neg_eigval = negative;
      for (double beta = -80; beta <= 80; beta += 0.25) {
        auto p = make_problem<Op>(d, 1, {});
        for (const ConstView& one : {p.args.q, p.args.k, p.args.v, p.args.mask, p.args.d_o})
          put(one, 0, 1);
        for (const ConstView& zero : {p.args.g, p.args.initial_state, p.args.d_final_state})
          put(zero, 0, 0);
        put(p.args.beta, 0, beta);
        oracle::expect_ok(run_problem(p, kernel));
        const double e = std::exp(-std::fabs(beta));
        const double slope = (negative ? 2 : 1) * e / ((1 + e) * (1 + e));
        EXPECT_NEAR(get(p.args.d_beta, 0), slope, 4e-7 * slope) << kernel << " at " << beta;
      }
    }
  }
}

// What is derived: sum d_o o + sum d_final_state final_state, in f64 from the op's own inputs.
struct Inputs {
  std::vector<double> q, k, v, g, beta, a_log, dt_bias, initial_state;
};

double loss(const Problem& p, const Inputs& in) {
  const GdnDesc& d = p.desc;
  oracle::GdnValues x{in.q, in.k, in.v, in.g, in.beta, in.initial_state};
  const auto width = static_cast<std::size_t>(d.key_dim);
  const auto heads = static_cast<std::size_t>(d.value_heads);
  if (d.qk_l2norm) {
    for (auto* keys : {&x.q, &x.k}) {
      for (std::size_t i = 0; i < keys->size(); i += width) {
        double squares = 1e-6;
        for (std::size_t j = i; j < i + width; ++j) squares += (*keys)[j] * (*keys)[j];
        for (std::size_t j = i; j < i + width; ++j) (*keys)[j] /= std::sqrt(squares);
      }
    }
  }
  for (std::size_t i = 0; i < x.g.size(); ++i) {
    if (d.gate)
      x.g[i] =
          -std::exp(in.a_log[i % heads]) * std::log1p(std::exp(x.g[i] + in.dt_bias[i % heads]));
    if (d.beta_sigmoid) x.beta[i] = (d.allow_neg_eigval ? 2 : 1) / (1 + std::exp(-x.beta[i]));
  }
  const auto r = oracle::gdn_recurrence(d, oracle::gdn_starts(d, p.args.cu_seqlens), x);
  const auto d_o = values(p.args.d_o);
  const auto d_state = oracle::keys_first(d, values(p.args.d_final_state));
  double sum = 0;
  for (std::size_t i = 0; i < d_o.size(); ++i) sum += d_o[i] * r.o[i];
  for (std::size_t i = 0; i < d_state.size(); ++i) sum += d_state[i] * r.final_state[i];
  return sum;
}

std::vector<double> differences(const Problem& p, Inputs in, std::vector<double> Inputs::* member) {
  std::vector<double> out;
  for (double& x : in.*member) {
    const double at = x, h = 1e-5;
    x = at + h;
    const double more = loss(p, in);
    x = at - h;
    out.push_back((more - loss(p, in)) / (2 * h));
    x = at;
  }
  return out;
}

void fill_problem(Problem& p, double decay, std::uint64_t seed) {
  const GdnDesc& d = p.desc;
  oracle::Rng rng(seed);
  oracle::fill_keys(d, p.args.q, 0, rng);
  oracle::fill_keys(d, p.args.k, 0.5, rng);
  oracle::fill_normal(p.args.v, rng);
  if (d.gate) {
    oracle::fill_normal(p.args.g, rng);
    oracle::fill_uniform(p.args.a_log, -2, 0, rng);
    oracle::fill_normal(p.args.dt_bias, rng);
  } else {
    oracle::fill_uniform(p.args.g, -2 * decay, 0, rng);
  }
  if (d.beta_sigmoid) {
    oracle::fill_normal(p.args.beta, rng);
  } else {
    oracle::fill_uniform(p.args.beta, 0, 1, rng);
  }
  for (const ConstView& x : {p.args.initial_state, p.args.d_o, p.args.d_final_state})
    oracle::fill_normal(x, rng);
  oracle::set_all(p.args.mask, 1);
}

Inputs inputs_of(const Problem& p) {
  const auto& a = p.args;
  return {values(a.q),       values(a.k),
          values(a.v),       values(a.g),
          values(a.beta),    values(a.a_log),
          values(a.dt_bias), oracle::keys_first(p.desc, values(a.initial_state))};
}

TEST(GdnChunkBackward, IsTheGradientInF32) {
  for (const bool fused : {false, true}) {
    for (const double decay : {0.0, 0.1, 5.0}) {
      GdnDesc d{.tokens = 37, .key_heads = 2, .value_heads = 6, .key_dim = 6, .value_dim = 5};
      d.chunk = 16;
      d.sequences = 3;
      d.qk_l2norm = d.gate = d.beta_sigmoid = fused;
      if (decay == 0.1) d.head_map = HeadMap::tiled;
      if (decay == 0.1) d.state_layout = StateLayout::value_key;
      d.allow_neg_eigval = fused && decay == 5.0;
      Problem p = make_problem<Op>(d, 1, {});
      oracle::set_values(p.args.cu_seqlens, {0, 18, 18, 37});
      fill_problem(p, decay, 2);
      oracle::expect_ok(run_problem(p));
      const Inputs in = inputs_of(p);
      const auto expect = [&](const char* what, const MutView& got,
                              std::vector<double> Inputs::* member) {
        EXPECT_LE(oracle::rms_ratio(values(got), differences(p, in, member)), 1e-5)
            << what << " " << fused << " " << decay;
      };
      expect("d_q", p.args.d_q, &Inputs::q);
      expect("d_k", p.args.d_k, &Inputs::k);
      expect("d_v", p.args.d_v, &Inputs::v);
      expect("d_g", p.args.d_g, &Inputs::g);
      expect("d_beta", p.args.d_beta, &Inputs::beta);
      if (fused) {
        expect("d_a_log", p.args.d_a_log, &Inputs::a_log);
        expect("d_dt_bias", p.args.d_dt_bias, &Inputs::dt_bias);
      }
      const auto d_state = oracle::keys_first(d, values(p.args.d_initial_state));
      EXPECT_LE(oracle::rms_ratio(d_state, differences(p, in, &Inputs::initial_state)), 1e-5);
    }
  }
}

constexpr double kMost = 3.4028234663852886e38;

// Token by token, each against its own size: mild tokens beside strong ones and resets, with and
// without d_final_state. The size of a d_g is that of the state before the token, decayed, times
// that of its gradient: what strong tokens have is as exact as what mild ones have.
TEST(GdnChunkBackward, StrongDecaysDoNotSpoilAnyGradient) {
  for (const std::int32_t chunk : {16, 32, 64}) {
    for (const double strong : {-0.3, -15.0, -60.0, -1e4, -1e6, -1e30, -kMost, -HUGE_VAL}) {
      for (const bool regular : {true, false}) {
        for (const bool all : {false, true}) {  // tokens are strong
          GdnDesc d{.tokens = 150, .key_heads = 2, .value_heads = 2, .key_dim = 16};
          d.value_dim = 12;
          d.chunk = chunk;
          if (regular) d.sequences = 3;
          Problem p = make_problem<Op>(d, 1, {});
          if (regular) oracle::set_values(p.args.cu_seqlens, {0, 70, 70, 150});
          fill_problem(p, 0, 6);
          oracle::Rng rng(7);
          oracle::fill_strong(p.args.g, d.value_heads, strong, regular, rng);
          if (all) oracle::set_all(p.args.g, strong);
          if (!regular) p.args.d_final_state = {};
          const oracle::GdnValues x{values(p.args.q),    values(p.args.k),
                                    values(p.args.v),    values(p.args.g),
                                    values(p.args.beta), values(p.args.initial_state)};
          const auto want = oracle::gdn_reverse(
              d, oracle::gdn_starts(d, p.args.cu_seqlens), x, values(p.args.d_o),
              p.args.d_final_state ? values(p.args.d_final_state) : std::vector<double>());
          oracle::expect_ok(run_problem(p));
          const auto what = std::to_string(chunk) + " " + std::to_string(strong) + " " +
                            std::to_string(regular) + std::to_string(all);
          const auto expect = [&](const char* name, const MutView& got,
                                  const std::vector<double>& wanted, std::int64_t width,
                                  const std::vector<double>& sizes) {
            const double error = oracle::worst_error(values(got), wanted, width, sizes);
            EXPECT_LE(error, 1e-6) << name << " " << what;
          };
          expect("d_q", p.args.d_q, want.q, d.key_dim, want.q_size);
          expect("d_k", p.args.d_k, want.k, d.key_dim, want.k_size);
          expect("d_v", p.args.d_v, want.v, d.value_dim, want.v_size);
          expect("d_g", p.args.d_g, want.g, 1, want.g_size);
          expect("d_beta", p.args.d_beta, want.beta, 1, want.beta_size);
          EXPECT_LE(oracle::worst_row(values(p.args.d_initial_state), want.initial_state,
                                      d.key_dim * d.value_dim),
                    1e-6)
              << what;
        }
      }
    }
  }
}

// By the gate: a reset's own gradients are 0, and it adds nothing to those of a_log and dt_bias.
TEST(GdnChunkBackward, AResetByTheGateHasNoGradient) {
  for (const std::string_view kernel : oracle::kBothKernels) {
    GdnDesc d{.tokens = 40, .key_dim = 8, .value_dim = 8, .chunk = 16};
    d.gate = true;
    Problem p = make_problem<Op>(d, 1, {});
    fill_problem(p, 0, 8);
    for (const std::int64_t t : {0, 5, 6, 15, 16, 31, 39}) put(p.args.g, t, HUGE_VAL);
    put(p.args.g, 20, 1e30);
    oracle::expect_ok(run_problem(p, kernel));
    const double rate = -std::exp(get(p.args.a_log, 0)), bias = get(p.args.dt_bias, 0);
    oracle::GdnValues x{values(p.args.q), values(p.args.k),    values(p.args.v),
                        values(p.args.g), values(p.args.beta), values(p.args.initial_state)};
    for (double& g : x.g) g = rate * (g + bias > 20 ? g + bias : std::log1p(std::exp(g + bias)));
    const auto want =
        oracle::gdn_reverse(d, {0, 40}, x, values(p.args.d_o), values(p.args.d_final_state));
    double d_a_log = 0, d_dt_bias = 0;
    for (std::int64_t t = 0; t < 40; ++t) {
      const double a = get(p.args.g, t) + bias;
      const auto i = static_cast<std::size_t>(t);
      if (a > 1000) {
        EXPECT_EQ(get(p.args.d_g, t), 0) << kernel << " " << t;
        continue;
      }
      const double d_g = want.g[i] * rate / (1 + std::exp(-a));
      d_a_log += want.g[i] * x.g[i];
      d_dt_bias += d_g;
      EXPECT_NEAR(get(p.args.d_g, t), d_g, 1e-5 * want.g_size[i]) << kernel << " " << t;
    }
    EXPECT_NEAR(get(p.args.d_a_log, 0) / d_a_log, 1, 1e-5);
    EXPECT_NEAR(get(p.args.d_dt_bias, 0) / d_dt_bias, 1, 1e-5);
  }
}

// The same inputs in bf16 and, widened, in f32.
TEST(GdnChunkBackward, Bf16IsCloseToF32) {
  GdnDesc half{.tokens = 150, .key_heads = 1, .value_heads = 2, .key_dim = 64, .value_dim = 64};
  half.element = DType::bf16;
  GdnDesc full = half;
  full.element = DType::f32;
  Problem got = make_problem<Op>(half, 1, {}), want = make_problem<Op>(full, 1, {});
  fill_problem(got, 0.1, 3);
  fill_problem(want, 0.1, 3);
  oracle::set_values(want.args.q, values(got.args.q));
  oracle::set_values(want.args.k, values(got.args.k));
  oracle::set_values(want.args.v, values(got.args.v));
  oracle::set_values(want.args.d_o, values(got.args.d_o));
  oracle::expect_ok(run_problem(got));
  oracle::expect_ok(run_problem(want));
  EXPECT_LE(oracle::rms_ratio(values(got.args.d_q), values(want.args.d_q)), 0.008);
  EXPECT_LE(oracle::rms_ratio(values(got.args.d_k), values(want.args.d_k)), 0.008);
  EXPECT_LE(oracle::rms_ratio(values(got.args.d_v), values(want.args.d_v)), 0.008);
  EXPECT_EQ(values(got.args.d_g), values(want.args.d_g));
  EXPECT_EQ(values(got.args.d_beta), values(want.args.d_beta));
  EXPECT_EQ(values(got.args.d_initial_state), values(want.args.d_initial_state));
}

// NaN in one sequence leaves every bit of the others' gradients as it was; strong decay gives none.
TEST(GdnChunkBackward, SequencesDoNotMeet) {
  GdnDesc d{.tokens = 80, .key_heads = 1, .value_heads = 3, .key_dim = 10, .value_dim = 7};
  d.chunk = 16;
  d.sequences = 4;
  Problem clean = make_problem<Op>(d, 1, {}), poisoned = make_problem<Op>(d, 1, {});
  for (Problem* p : {&clean, &poisoned}) {
    oracle::set_values(p->args.cu_seqlens, {0, 30, 30, 49, 80});
    fill_problem(*p, 1e4, 4);
  }
  for (std::int64_t t = 30; t < 49; ++t) {
    put(poisoned.args.k, t * 10, NAN);
    put(poisoned.args.d_o, t * 21, NAN);
    put(poisoned.args.g, t * 3, NAN);
  }
  oracle::expect_ok(run_problem(clean));
  oracle::expect_ok(run_problem(poisoned));
  const auto compare = [&](const MutView& got, const MutView& want, std::int64_t row) {
    for (std::int64_t i = 0; i < got.shape.numel(); ++i) {
      EXPECT_TRUE(std::isfinite(get(want, i)));
      if (i / row < 30 || i / row >= 49) {
        EXPECT_EQ(get(got, i), get(want, i));
      }
    }
  };
  compare(poisoned.args.d_q, clean.args.d_q, 10);
  compare(poisoned.args.d_k, clean.args.d_k, 10);
  compare(poisoned.args.d_v, clean.args.d_v, 21);
  compare(poisoned.args.d_g, clean.args.d_g, 3);
  compare(poisoned.args.d_beta, clean.args.d_beta, 3);
}

TEST(GdnChunkBackward, MaskedTokensHaveNoGradient) {
  GdnDesc d{.tokens = 40, .key_dim = 8, .value_dim = 8, .chunk = 16};
  d.qk_l2norm = d.gate = d.beta_sigmoid = true;
  Problem p = make_problem<Op>(d, 1, {});
  fill_problem(p, 0, 5);
  for (std::int64_t t = 0; t < 40; t += 3) {
    put(p.args.mask, t, 0);
    for (const ConstView& x : {p.args.q, p.args.k, p.args.v, p.args.d_o}) put(x, t * 8 + 2, NAN);
    put(p.args.g, t, NAN);
    put(p.args.beta, t, NAN);
  }
  oracle::expect_ok(run_problem(p));
  for (std::int64_t i = 0; i < 320; ++i) {
    for (const MutView& x : {p.args.d_q, p.args.d_k, p.args.d_v}) {
      EXPECT_TRUE(std::isfinite(get(x, i)));
      if (i / 8 % 3 == 0) {
        EXPECT_EQ(get(x, i), 0);
      }
    }
  }
  for (std::int64_t t = 0; t < 40; t += 3) {
    EXPECT_EQ(get(p.args.d_g, t), 0);
    EXPECT_EQ(get(p.args.d_beta, t), 0);
  }
  EXPECT_TRUE(std::isfinite(get(p.args.d_a_log, 0)));
}

// ---- on CUDA, with the bits of `ref` ----

// Several whole chunks, keys and values of several slabs, a last chunk of one token, an empty
// sequence; and a NaN, which must come to the same elements.
TEST(GdnChunkBackward, CudaGivesTheBitsOfRefForLongSequences) {
  BITTERN_NEEDS_CUDA();
  GdnDesc d{.tokens = 210, .value_heads = 2, .key_dim = 130, .value_dim = 129, .sequences = 4};
  d.qk_l2norm = d.gate = d.beta_sigmoid = d.allow_neg_eigval = true;
  Problem want = make_problem<Op>(d, 1, {}), got = make_problem<Op>(d, 1, {});
  for (Problem* p : {&want, &got}) {
    oracle::set_values(p->args.cu_seqlens, {0, 129, 129, 199, 210});
    fill_problem(*p, 0, 17);
    for (const std::int64_t t : {3, 64, 128, 205}) put(p->args.mask, t, 0);
    put(p->args.g, 2 * 20, HUGE_VAL);                  // a reset
    put(p->args.d_o, (150 * 2 + 1) * 129 + 128, NAN);  // the third sequence, head 1
  }
  oracle::expect_ok(run_problem(want, "ref"));
  oracle::expect_ok(run_problem(got, "cuda", Preference::exact, kGpu));
  std::int64_t nans = 0;
  const auto compare = [&](const char* what, const MutView& x, const MutView& y) {
    for (std::int64_t i = 0; i < x.shape.numel(); ++i) {
      const double one = get(x, i), other = get(y, i);
      nans += std::isnan(one) ? 1 : 0;
      ASSERT_TRUE(one == other || (std::isnan(one) && std::isnan(other)))
          << what << " " << i << ": " << one << " and " << other;
    }
  };
  const Op::Args &x = want.args, &y = got.args;
  compare("d_q", x.d_q, y.d_q);
  compare("d_k", x.d_k, y.d_k);
  compare("d_v", x.d_v, y.d_v);
  compare("d_g", x.d_g, y.d_g);
  compare("d_beta", x.d_beta, y.d_beta);
  compare("d_a_log", x.d_a_log, y.d_a_log);
  compare("d_dt_bias", x.d_dt_bias, y.d_dt_bias);
  compare("d_initial_state", x.d_initial_state, y.d_initial_state);
  EXPECT_GT(nans, 0);
}

// The host cannot look at a device's cu_seqlens: a wrong one touches nothing outside the operands.
// The emulated device has pages without access behind them.
TEST(GdnChunkBackward, CudaStaysInsideTheOperandsWithWrongBounds) {
  BITTERN_NEEDS_CUDA();
  GdnDesc d{.tokens = 53, .key_dim = 8, .value_dim = 8, .chunk = 16, .sequences = 4};
  d.qk_l2norm = d.gate = true;
  oracle::Rng rng(18);
  std::vector<std::vector<double>> bounds{
      {7, -9, 2000, 40, 16}, {40, 3, 53, 53, 53}, {-2147483648., 2147483647., 0, 53, 9}};
  for (int i = 0; i < 20; ++i) {
    auto& one = bounds.emplace_back();
    for (int n = 0; n < 5; ++n) one.push_back(static_cast<double>(rng.below(80)) - 13);
  }
  for (const auto& wrong : bounds) {
    Problem p = make_problem<Op>(d, 1, {});
    fill_problem(p, 0, 19);
    oracle::set_values(p.args.cu_seqlens, wrong);
    oracle::expect_ok(run_problem(p, "cuda", Preference::exact, kGpu));
  }
}

TEST(GdnChunkBackward, CudaMeetsTheContractForEverySize) {
  BITTERN_NEEDS_CUDA();
  for (const DType element : {DType::f32, DType::f16, DType::bf16}) {
    for (const std::int32_t chunk : {16, 32, 64}) {
      for (const std::int64_t width : {1, 128, 256}) {
        const GdnDesc d{.tokens = 64,
                        .key_dim = width,
                        .value_dim = 257 - width,
                        .chunk = chunk,
                        .element = element};
        for (const Preference preference : {Preference::exact, Preference::fastest}) {
          const auto plan = Plan<Op>::select(d, kGpu, preference);
          ASSERT_TRUE(plan.ok()) << plan.status().message();
          EXPECT_EQ(plan->sku().kernel, "cuda");
          EXPECT_TRUE(plan->precision_guarantee().same_bits_on_all_backends);
          EXPECT_GT(plan->workspace_bytes(), 0u);
        }
      }
    }
  }
}

// ---- on tensor cores ----

oracle::GdnGradients reverse_of(const Problem& p) {
  const auto& a = p.args;
  return oracle::gdn_reverse(p.desc, oracle::gdn_starts(p.desc, a.cu_seqlens),
                             {values(a.q), values(a.k), values(a.v), values(a.g), values(a.beta),
                              oracle::keys_first(p.desc, values(a.initial_state))},
                             values(a.d_o), oracle::keys_first(p.desc, values(a.d_final_state)));
}

// Each gradient against the recurrence in f64, in both half types; chunks, heads and sequences in
// all orders.
TEST(GdnChunkBackward, TensorCoresAreCloseToTheGradient) {
  BITTERN_NEEDS_CUDA();
  if (!select_wgmma<Op>(wgmma_desc(64, 1, 1))) GTEST_SKIP() << "no products of a warpgroup";
  for (const double decay : {0.0, 0.1, 5.0}) {
    GdnDesc d = wgmma_desc(200, 2, 4);
    if (decay == 0.1) {
      d.element = DType::f16;
      d.head_map = HeadMap::tiled;
      d.state_layout = StateLayout::value_key;
    }
    if (decay == 5.0) d.sequences = 3;
    Problem p = make_problem<Op>(d, 1, {});
    if (d.sequences > 0) oracle::set_values(p.args.cu_seqlens, {0, 131, 131, 200});
    fill_problem(p, decay, 12);
    const auto want = reverse_of(p);
    oracle::expect_ok(run_wgmma(p));
    const double bound = d.element == DType::f16 ? 0.001 : 0.006;
    const auto expect = [&](const char* what, const std::vector<double>& got,
                            const std::vector<double>& wanted) {
      EXPECT_LE(oracle::rms_ratio(got, wanted), bound) << what << " " << decay;
    };
    expect("d_q", values(p.args.d_q), want.q);
    expect("d_k", values(p.args.d_k), want.k);
    expect("d_v", values(p.args.d_v), want.v);
    // Sums of many terms, which may all but cancel: against the size of each.
    EXPECT_LE(oracle::worst_error(values(p.args.d_g), want.g, 1, want.g_size), bound) << decay;
    expect("d_beta", values(p.args.d_beta), want.beta);
    expect("d_initial_state", oracle::keys_first(d, values(p.args.d_initial_state)),
           want.initial_state);
  }
}

// A sequence alone is cut into segments where there are multiprocessors for them; beside enough
// copies of itself it is not (on the emulated device: with BITTERN_EMULATED_MULTIPROCESSORS).
TEST(GdnChunkBackward, TensorCoresGiveSegmentsTheirGradients) {
  BITTERN_NEEDS_CUDA();
  if (!select_wgmma<Op>(wgmma_desc(64, 1, 1))) GTEST_SKIP() << "no products of a warpgroup";
  CudaDeviceInfo device;
  oracle::expect_ok((*cuda_plugin(0))->info(0, &device));
  for (const double decay : {0.0, 0.01, 10.0}) {
    GdnDesc d = wgmma_desc(device.name == "emulated" ? 270 : 2670, 1, 1);
    Problem alone = make_problem<Op>(d, 1, {});
    fill_problem(alone, decay, 17);
    const auto want = reverse_of(alone);
    oracle::expect_ok(run_wgmma(alone));
    d.batch = device.multiprocessors / 8 + 1;
    Problem beside = make_problem<Op>(d, 1, {});
    const Op::Args &from = alone.args, &to = beside.args;
    for (const auto& [x, y] :
         {std::pair{to.q, from.q}, std::pair{to.k, from.k}, std::pair{to.v, from.v},
          std::pair{to.g, from.g}, std::pair{to.beta, from.beta}, std::pair{to.d_o, from.d_o},
          std::pair{to.mask, from.mask}, std::pair{to.initial_state, from.initial_state},
          std::pair{to.d_final_state, from.d_final_state}})
      for (std::int64_t i = 0; i < x.shape.numel(); ++i) put(x, i, get(y, i % y.shape.numel()));
    oracle::expect_ok(run_wgmma(beside));
    const auto compare = [&](const char* what, const MutView& one, const MutView& all,
                             const std::vector<double>& exact) {
      const std::vector<double> got = values(one);
      std::vector<double> plain = values(all);
      plain.resize(got.size());
      const double error = oracle::rms_ratio(got, exact);
      EXPECT_LE(error, 0.006) << what << " " << decay;
      EXPECT_LE(error, 1.15 * oracle::rms_ratio(plain, exact)) << what << " " << decay;
    };
    compare("d_q", from.d_q, to.d_q, want.q);
    compare("d_k", from.d_k, to.d_k, want.k);
    compare("d_v", from.d_v, to.d_v, want.v);
    compare("d_beta", from.d_beta, to.d_beta, want.beta);
    compare("d_initial_state", from.d_initial_state, to.d_initial_state, want.initial_state);
    EXPECT_LE(oracle::worst_error(values(from.d_g), want.g, 1, want.g_size), 0.006) << decay;
    const auto d_k = values(from.d_k), d_g = values(from.d_g);
    oracle::expect_ok(run_wgmma(alone));
    EXPECT_EQ(values(from.d_k), d_k);
    EXPECT_EQ(values(from.d_g), d_g);
  }
}

// All tokens have the same key, and L is c below the diagonal. So T has -c beside the diagonal,
// next to it -c (1 - c), and so on, and K^T W T and K^T B T^T all but cancel. What c loses in bf16
// does not: it adds up over a chunk's tokens, in S and in H.
TEST(GdnChunkBackward, TensorCoresRoundTheInverseWithinTheBound) {
  BITTERN_NEEDS_CUDA();
  const GdnDesc d = wgmma_desc(128, 1, 1);
  const auto plan = select_wgmma<Op>(d);
  if (!plan) GTEST_SKIP() << "no products of a warpgroup";
  constexpr double kC = 1 - 0x1.08p-9;  // nearly half way between two numbers of bf16
  for (const bool from_state : {false, true}) {
    Problem got = make_problem<Op>(d, 1, {}), want = make_problem<Op>(d, 1, {});
    for (Problem* p : {&got, &want}) {
      const Op::Args& a = p->args;
      for (const ConstView& x : {a.q, a.k, a.g, a.d_o, a.initial_state}) oracle::set_all(x, 0);
      for (const ConstView& x : {a.v, a.mask}) oracle::set_all(x, 1);
      oracle::set_all(a.beta, kC);
      oracle::set_all(a.d_final_state, from_state ? 1 : 0);
      for (std::int64_t t = 0; t < d.tokens; ++t) {
        put(a.q, t * d.key_dim, 1);
        put(a.k, t * d.key_dim, 1);
      }
      for (std::int64_t i = 0; i < d.value_dim && !from_state; ++i)
        put(a.d_o, (d.tokens - 1) * d.value_dim + i, 1);
    }
    oracle::expect_ok(run_problem(want, "ref"));
    oracle::expect_ok(run_wgmma(got));
    oracle::Judge judge(plan->precision_guarantee().error_bound);
    oracle::Cases<Op>::judge(d, got.args, want.args, judge);
    EXPECT_EQ(judge.failure(), "") << from_state;
    EXPECT_GT(judge.worst(), 0.1) << from_state;
  }
}

// One token in 8 forgets all, or nearly. Token by token, each against its own size: what g decays
// is as close for strong tokens as for mild ones.
TEST(GdnChunkBackward, TensorCoresKeepMildDecaysBesideStrongOnes) {
  BITTERN_NEEDS_CUDA();
  if (!select_wgmma<Op>(wgmma_desc(64, 1, 1))) GTEST_SKIP() << "no products of a warpgroup";
  for (const double strong : {-15.0, -1e4, -HUGE_VAL}) {
    GdnDesc d = wgmma_desc(150, 1, 2);
    d.sequences = 3;
    Problem p = make_problem<Op>(d, 1, {});
    oracle::set_values(p.args.cu_seqlens, {0, 70, 70, 150});
    fill_problem(p, 0, 13);
    oracle::Rng rng(14);
    oracle::fill_strong(p.args.g, d.value_heads, strong, true, rng);
    const auto want = reverse_of(p);
    oracle::expect_ok(run_wgmma(p));
    EXPECT_LE(oracle::rms_ratio(values(p.args.d_q), want.q), 0.006) << strong;
    EXPECT_LE(oracle::rms_ratio(values(p.args.d_k), want.k), 0.006) << strong;
    EXPECT_LE(oracle::rms_ratio(values(p.args.d_v), want.v), 0.006) << strong;
    EXPECT_LE(oracle::worst_error(values(p.args.d_g), want.g, 1, want.g_size), 0.01) << strong;
    EXPECT_LE(oracle::worst_error(values(p.args.d_beta), want.beta, 1, want.beta_size), 0.02)
        << strong;
  }
}

// A NaN stays in its sequence and value head, or key head for d_q and d_k; of a masked token
// nothing is seen.
TEST(GdnChunkBackward, TensorCoresKeepNanInItsSequenceAndHead) {
  BITTERN_NEEDS_CUDA();
  GdnDesc d = wgmma_desc(150, 2, 4);
  d.sequences = 3;
  if (!select_wgmma<Op>(d)) GTEST_SKIP() << "no products of a warpgroup";
  Problem clean = make_problem<Op>(d, 1, {}), poisoned = make_problem<Op>(d, 1, {});
  for (Problem* p : {&clean, &poisoned}) {
    oracle::set_values(p->args.cu_seqlens, {0, 40, 110, 150});
    fill_problem(*p, 0.1, 15);
    put(p->args.mask, 5, 0);
  }
  put(poisoned.args.d_o, (70 * 4 + 1) * 128 + 9, NAN);  // value head 1, so key head 0
  put(poisoned.args.k, (5 * 2 + 1) * 128, NAN);         // masked
  put(poisoned.args.d_o, 5 * 4 * 128, NAN);
  put(poisoned.args.g, 5 * 4, NAN);
  oracle::expect_ok(run_wgmma(clean));
  oracle::expect_ok(run_wgmma(poisoned));
  std::int64_t spoiled = 0;
  const auto compare = [&](const char* what, const MutView& got, const MutView& want,
                           std::int64_t heads, std::int64_t width, std::int64_t head) {
    for (std::int64_t i = 0; i < got.shape.numel(); ++i) {
      const std::int64_t t = i / (heads * width);
      if (t >= 40 && t < 110 && i / width % heads == head) {
        spoiled += std::isnan(get(got, i)) ? 1 : 0;
      } else {
        EXPECT_EQ(get(got, i), get(want, i)) << what << " " << i;
      }
    }
  };
  compare("d_q", poisoned.args.d_q, clean.args.d_q, 2, 128, 0);
  compare("d_k", poisoned.args.d_k, clean.args.d_k, 2, 128, 0);
  compare("d_v", poisoned.args.d_v, clean.args.d_v, 4, 128, 1);
  compare("d_g", poisoned.args.d_g, clean.args.d_g, 4, 1, 1);
  compare("d_beta", poisoned.args.d_beta, clean.args.d_beta, 4, 1, 1);
  EXPECT_GT(spoiled, 0);
  for (const MutView& x : {clean.args.d_v, clean.args.d_q})
    for (std::int64_t i = 0; i < x.shape.numel(); ++i) {
      if (i * 150 / x.shape.numel() == 5) {
        EXPECT_EQ(get(x, i), 0);
      }
    }
}

// Two heads of four give the same bits as two that lie together.
TEST(GdnChunkBackward, TensorCoresTakeSlicesOfLargerArrays) {
  BITTERN_NEEDS_CUDA();
  const GdnDesc d = wgmma_desc(100, 2, 2);
  if (!select_wgmma<Op>(d)) GTEST_SKIP() << "no products of a warpgroup";
  Problem sliced = make_problem<Op>(wgmma_desc(100, 4, 4), 1, {});
  fill_problem(sliced, 0.1, 16);
  sliced.desc = d;
  Op::operands(d, sliced.args, [](const char*, auto& view, const Operand& expected) {
    if (view) view.shape = expected.shape;
  });
  Problem dense = make_problem<Op>(d, 1, {});
  const Op::Args &from = sliced.args, &to = dense.args;
  for (const auto& [x, y] :
       {std::pair{to.q, from.q}, std::pair{to.k, from.k}, std::pair{to.v, from.v},
        std::pair{to.g, from.g}, std::pair{to.beta, from.beta}, std::pair{to.d_o, from.d_o},
        std::pair{to.mask, from.mask}, std::pair{to.initial_state, from.initial_state},
        std::pair{to.d_final_state, from.d_final_state}})
    oracle::set_values(x, values(y));
  oracle::expect_ok(run_wgmma(sliced));
  oracle::expect_ok(run_wgmma(dense));
  EXPECT_NE(from.d_q.stride[1], to.d_q.stride[1]);
  for (const auto& [got, want] :
       {std::pair{from.d_q, to.d_q}, std::pair{from.d_k, to.d_k}, std::pair{from.d_v, to.d_v},
        std::pair{from.d_g, to.d_g}, std::pair{from.d_beta, to.d_beta},
        std::pair{from.d_initial_state, to.d_initial_state}})
    EXPECT_EQ(values(got), values(want));
}

// Keys and values of all sizes, with segments or without, in a few heads and in many.
TEST(GdnChunkBackward, TensorCoresTakeOtherSizes) {
  BITTERN_NEEDS_CUDA();
  if (!select_wgmma<Op>(wgmma_desc(64, 1, 1))) GTEST_SKIP() << "no products of a warpgroup";
  for (const GdnDesc& d : oracle::wgmma_sizes()) {
    Problem p = make_problem<Op>(d, 1, {});
    fill_problem(p, 0.05, 22);
    const auto want = reverse_of(p);
    oracle::expect_ok(run_wgmma(p));
    const auto expect = [&](const char* what, const std::vector<double>& got,
                            const std::vector<double>& wanted) {
      EXPECT_LE(oracle::rms_ratio(got, wanted), 0.006) << what << " " << oracle::sizes_text(d);
    };
    expect("d_q", values(p.args.d_q), want.q);
    expect("d_k", values(p.args.d_k), want.k);
    expect("d_v", values(p.args.d_v), want.v);
    expect("d_beta", values(p.args.d_beta), want.beta);
    expect("d_initial_state", oracle::keys_first(d, values(p.args.d_initial_state)),
           want.initial_state);
    EXPECT_LE(oracle::worst_error(values(p.args.d_g), want.g, 1, want.g_size), 0.006)
        << oracle::sizes_text(d);
  }
}

TEST(GdnChunkBackward, TensorCoresAreForTheFastestPreference) {
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
        std::pair{GdnDesc{.tokens = 64, .value_dim = 32, .element = DType::bf16},
                  "value_dim: 32, expected a multiple of 64;"},
        std::pair{GdnDesc{.tokens = 64, .chunk = 32, .element = DType::f16},
                  "chunk: 32, expected 64;"}}) {
    oracle::expect_error(
        select_wgmma<Op>(wrong).status(), Code::unsupported,
        std::string("gdn_chunk_backward: no kernel on cuda:0 named cuda_wgmma: cuda_wgmma: ") +
            message);
  }
  auto unaligned = make_problem<Op>(d, 1, {.unaligned = true});
  oracle::expect_error(run_wgmma(unaligned), Code::unsupported,
                       "gdn_chunk_backward: d_o: address is 2 bytes past a multiple of 16, "
                       "expected a multiple of 16 for kernel cuda_wgmma");
}

TEST(GdnChunkBackward, RefusesWhatItCannotDo) {
  oracle::expect_error(Plan<Op>::select({.key_heads = 3, .value_heads = 4}).status(),
                       Code::invalid_argument,
                       "gdn_chunk_backward: value_heads: 4, expected a multiple of key_heads 3");
  const GdnDesc d{.tokens = 9, .sequences = 1};
  Problem p = make_problem<Op>(d, 1, {});
  oracle::set_values(p.args.cu_seqlens, {0, 8});
  oracle::expect_error(run_problem(p), Code::invalid_argument,
                       "gdn_chunk_backward: cu_seqlens: [1] is 8, expected tokens, 9");
}

}  // namespace
}  // namespace bittern
