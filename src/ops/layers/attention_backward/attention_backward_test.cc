#include <gtest/gtest.h>

#include <cmath>

#include "core/numerics.h"
#include "oracle/op_test.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using oracle::expect_error;
using oracle::expect_ok;
using oracle::kBothKernels;
using oracle::run_op;
using Op = AttentionBackward;
using Desc = AttentionBackwardDesc;
using Floats = std::vector<float>;
using Doubles = std::vector<double>;

TEST(AttentionBackward, MatchesRefEverywhere) { oracle::expect_parity("attention_backward"); }

// A problem in dense tensors of its own.
struct Problem {
  Desc d;
  std::vector<std::int32_t> bounds;  // empty: one sequence
  Floats d_out, q, k, v, d_q, d_k, d_v;

  Problem(const Desc& desc, std::vector<std::int32_t> cu_seqlens, std::uint64_t seed = 1,
          double size = 1)
      : d(desc), bounds(std::move(cu_seqlens)) {
    oracle::Rng rng(seed);
    const auto queries = static_cast<std::size_t>(d.query_shape().numel());
    const auto keys = static_cast<std::size_t>(d.key_shape().numel());
    for (Floats* x : {&d_out, &q, &k, &v}) {
      x->resize(x == &d_out || x == &q ? queries : keys);
      for (float& value : *x) value = static_cast<float>(size * rng.normal());
    }
    d_q.resize(queries, NAN);
    d_k.resize(keys, NAN);
    d_v.resize(keys, NAN);
  }

  Op::Args args() {
    Op::Args a{.d_out = view(std::as_const(d_out).data(), d.query_shape()),
               .q = view(std::as_const(q).data(), d.query_shape()),
               .k = view(std::as_const(k).data(), d.key_shape()),
               .v = view(std::as_const(v).data(), d.key_shape()),
               .d_q = view(d_q.data(), d.query_shape()),
               .d_k = view(d_k.data(), d.key_shape()),
               .d_v = view(d_v.data(), d.key_shape())};
    if (!bounds.empty())
      a.cu_seqlens = view(std::as_const(bounds).data(), {static_cast<std::int64_t>(bounds.size())});
    return a;
  }
  Status run(std::string_view kernel) { return run_op<Op>(d, args(), kernel); }
};

// Two tokens of one number, scale 1: the second query's weights are 1/4 and 3/4.
TEST(AttentionBackward, MatchesAnExampleWorkedByHand) {
  for (const std::string_view kernel : kBothKernels) {
    Problem p({.tokens = 2, .dim = 1, .scale = 1}, {});
    p.q = {7, 1};
    p.k = {0, std::log(3.0f)};
    p.v = {2, 6};
    p.d_out = {3, 8};
    expect_ok(p.run(kernel));
    // g = 16, 48; D = 16 / 4 + 48 * 3 / 4 = 40; z = (16 - 40) / 4, (48 - 40) * 3 / 4 = -6, 6.
    // The first query has the weight 1 and z = 0.
    const auto near = [&](const Floats& got, double first, double second) {
      EXPECT_NEAR(got[0], first, 1e-5) << kernel;
      EXPECT_NEAR(got[1], second, 1e-5) << kernel;
    };
    near(p.d_q, 0, 6 * std::log(3.0));
    near(p.d_k, -6, 6);
    near(p.d_v, 3 + 8 * 0.25, 8 * 0.75);
  }
}

struct Inputs {
  Doubles q, k, v;
};

// <d_out, out> of attention in f64, straight from its definition.
double loss(const Problem& p, const Inputs& in) {
  const Desc& d = p.d;
  const auto dim = static_cast<std::size_t>(d.dim);
  const double scale = d.scale != 0 ? d.scale : 1 / std::sqrt(static_cast<double>(d.dim));
  double sum = 0;
  for (std::size_t s = 0; s + 1 < p.bounds.size(); ++s) {
    for (std::int64_t i = p.bounds[s]; i < p.bounds[s + 1]; ++i) {
      for (std::int64_t h = 0; h < d.heads; ++h) {
        const auto query = static_cast<std::size_t>(i * d.heads + h) * dim;
        double l = 0, weighted = 0;
        for (std::int64_t t = p.bounds[s]; t <= i; ++t) {
          if (d.window > 0 && i - t >= d.window) continue;
          const auto key =
              static_cast<std::size_t>(t * d.kv_heads + h / (d.heads / d.kv_heads)) * dim;
          double x = 0, g = 0;
          for (std::size_t j = 0; j < dim; ++j) {
            x += scale * in.q[query + j] * in.k[key + j];
            g += static_cast<double>(p.d_out[query + j]) * in.v[key + j];
          }
          if (d.softcap > 0) x = d.softcap * std::tanh(x / d.softcap);
          l += std::exp(x);
          weighted += std::exp(x) * g;
        }
        sum += weighted / l;
      }
    }
  }
  return sum;
}

TEST(AttentionBackward, IsTheDerivativeOfTheForward) {
  const std::vector<std::int32_t> bounds{0, 7, 7, 8, 15};  // one is empty, one has one token
  for (const std::int64_t window : {0, 3}) {
    for (const double softcap : {0.0, 1.5}) {
      Problem p({.tokens = 15,
                 .sequences = 4,
                 .heads = 6,
                 .kv_heads = 2,
                 .dim = 3,
                 .scale = window == 0 ? 0.0 : 0.9,
                 .softcap = softcap,
                 .window = window},
                bounds);
      const auto widen = [](const Floats& x) { return Doubles(x.begin(), x.end()); };
      const Inputs in{widen(p.q), widen(p.k), widen(p.v)};
      for (const std::string_view kernel : kBothKernels) {
        expect_ok(p.run(kernel));
        const auto compare = [&](const char* name, Doubles Inputs::* member, const Floats& got) {
          constexpr double kStep = 1e-5;
          Inputs moved = in;
          for (std::size_t i = 0; i < got.size(); ++i) {
            double& x = (moved.*member)[i];
            const double at = x;
            x = at + kStep;
            const double more = loss(p, moved);
            x = at - kStep;
            const double slope = (more - loss(p, moved)) / (2 * kStep);
            x = at;
            EXPECT_NEAR(got[i], slope, 1e-5) << kernel << " " << name << " " << i;
          }
        };
        compare("d_q", &Inputs::q, p.d_q);
        compare("d_k", &Inputs::k, p.d_k);
        compare("d_v", &Inputs::v, p.d_v);
      }
    }
  }
}

TEST(AttentionBackward, ATokenAloneHasNoGradientOfItsLogit) {
  for (const std::string_view kernel : kBothKernels) {
    Problem p({.tokens = 2, .sequences = 3, .heads = 3, .dim = 4}, {0, 1, 1, 2});
    expect_ok(p.run(kernel));
    for (const float x : p.d_q) EXPECT_EQ(x, 0) << kernel;
    for (const float x : p.d_k) EXPECT_EQ(x, 0) << kernel;
    for (std::size_t t = 0; t < 2; ++t) {
      for (std::size_t j = 0; j < 4; ++j) {
        const std::size_t at = t * 12 + j;
        EXPECT_EQ(p.d_v[t * 4 + j], p.d_out[at] + p.d_out[at + 4] + p.d_out[at + 8]) << kernel;
      }
    }
  }
}

TEST(AttentionBackward, EmptySequencesTakeNoMemory) {
  const Desc d{.sequences = std::int64_t{1} << 31, .heads = 1 << 16};
  const auto plan = Plan<Op>::select(d, {}, Preference::exact, "cpu");
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  EXPECT_EQ(plan->workspace_bytes(), 0u);
}

// Logits of -inf: the first query has no other, and adds nothing; to the later ones they weigh 0.
TEST(AttentionBackward, LogitsOfMinusInfinityWeighNothing) {
  for (const std::string_view kernel : kBothKernels) {
    Problem p({.tokens = 3, .dim = 1, .scale = 1}, {});
    p.q = {1e30f, 1e30f, 1};
    p.k = {-1e30f, 1, 1};
    p.v = {5, 6, 8};
    p.d_out = {1, 1, 2};
    expect_ok(p.run(kernel));
    EXPECT_EQ(p.d_q, (Floats{0, 0, 0.5f * -2 + 0.5f * 2})) << kernel;
    EXPECT_EQ(p.d_k, (Floats{0, -1, 1})) << kernel;
    EXPECT_EQ(p.d_v, (Floats{0, 1 + 1, 1})) << kernel;
  }
}

// A NaN in each operand and at each place, in windows and groups: exactly what is made of it
// changes, and no other bit.
TEST(AttentionBackward, ANanReachesOnlyWhatIsMadeOfIt) {
  constexpr std::int64_t kTokens = 90, kHeads = 2, kWindow = 70, kAt = 66;
  const Desc d{.tokens = kTokens, .heads = kHeads, .kv_heads = 1, .dim = 5, .window = kWindow};
  for (const std::string_view kernel : kBothKernels) {
    Problem clean(d, {});
    expect_ok(clean.run(kernel));
    for (const int operand : {0, 1, 2, 3}) {
      Problem p(d, {});
      const bool of_query = operand < 2;
      Floats* const operands[] = {&p.d_out, &p.q, &p.k, &p.v};
      (*operands[operand])[static_cast<std::size_t>(kAt * (of_query ? kHeads : 1) * d.dim + 2)] =
          NAN;  // head 0
      expect_ok(p.run(kernel));
      // The queries that are made of it, and the tokens that these see.
      const auto query = [&](std::int64_t i, std::int64_t h) {
        return of_query ? i == kAt && h == 0 : i >= kAt && i < kAt + kWindow;
      };
      const std::int64_t last = of_query ? kAt : kTokens - 1;
      const auto key = [&](std::int64_t t) { return t > kAt - kWindow && t <= last; };
      const auto compare = [&](const char* name, bool spoilt, float got, float want) {
        if (spoilt) {
          EXPECT_TRUE(std::isnan(got)) << kernel << " " << operand << " " << name;
        } else {
          EXPECT_EQ(got, want) << kernel << " " << operand << " " << name;
        }
      };
      for (std::int64_t t = 0; t < kTokens; ++t) {
        for (std::int64_t j = 0; j < d.dim; ++j) {
          for (std::int64_t h = 0; h < kHeads; ++h) {
            const auto at = static_cast<std::size_t>((t * kHeads + h) * d.dim + j);
            compare("d_q", query(t, h), p.d_q[at], clean.d_q[at]);
          }
          const auto at = static_cast<std::size_t>(t * d.dim + j);
          compare("d_k", key(t), p.d_k[at], clean.d_k[at]);
          // p is made of q and k alone; a column of d_v of its column of d_out.
          const bool d_v = operand == 0 ? key(t) && j == 2 : operand < 3 && key(t);
          compare("d_v", d_v, p.d_v[at], clean.d_v[at]);
        }
      }
    }
  }
}

// Whole heads on one thread, and blocks of one head on many, whose sums are kept between two
// passes.
TEST(AttentionBackward, ThreadsDoNotChangeABit) {
  const Desc d{.tokens = 700, .sequences = 3, .heads = 2, .kv_heads = 1, .dim = 16, .window = 150};
  Problem one(d, {0, 30, 640, 700});
  const auto run = [](Problem& p, int threads) {
    const auto plan = Plan<Op>::select(p.d, {}, Preference::exact, "cpu", threads);
    return plan ? oracle::run_plan(*plan, p.args()) : plan.status();
  };
  expect_ok(run(one, 1));
  for (const int threads : {2, 3, 16}) {
    Problem many(d, one.bounds);
    expect_ok(run(many, threads));
    EXPECT_EQ(many.d_q, one.d_q) << threads;
    EXPECT_EQ(many.d_k, one.d_k) << threads;
    EXPECT_EQ(many.d_v, one.d_v) << threads;
  }
}

TEST(AttentionBackward, ErrorsNameWhatIsWrong) {
  const Code bad = Code::invalid_argument;
  const std::string op = "attention_backward: ";
  const auto check = [&](const Desc& d, const std::string& message) {
    expect_error(Op::check(d), bad, op + message);
  };
  check({.tokens = -1}, "tokens: -1, expected at least 0");
  check({.sequences = -1}, "sequences: -1, expected 0..2147483648");
  check({.heads = 0}, "heads: 0, expected 1..65536");
  check({.heads = 4, .kv_heads = 0}, "kv_heads: 0, expected 1..65536");
  check({.heads = 4, .kv_heads = 3}, "heads: 4, expected a multiple of kv_heads 3");
  check({.dim = 0}, "dim: 0, expected 1..1024");
  check({.dim = 1025}, "dim: 1025, expected 1..1024");
  check({.scale = HUGE_VAL}, "scale: inf, expected a number that is finite in f32");
  check({.softcap = NAN}, "softcap: nan, expected a number that is finite in f32");
  check({.softcap = -1}, "softcap: -1, expected 0 or a positive normal number of f32");
  check({.softcap = 1e-40}, "softcap: 1e-40, expected 0 or a positive normal number of f32");
  check({.window = -1}, "window: -1, expected 0..2147483648");
  check({.tokens = std::int64_t{1} << 40, .heads = 1 << 16}, "sizes: more than 2^59 elements");

  Problem p({.tokens = 3, .sequences = 2, .heads = 2, .dim = 4}, {0, 2, 4});
  expect_error(p.run("cpu"), bad, op + "cu_seqlens: [2] is 4, expected tokens, 3");
  p.bounds = {0, 2, 1};
  expect_error(p.run("cpu"), bad, op + "cu_seqlens: [2] is 1, expected at least [1], 2");
  p.bounds = {1, 2, 3};
  expect_error(p.run("cpu"), bad, op + "cu_seqlens: [0] is 1, expected 0");
  p.bounds = {0, 2, 3};
  expect_ok(p.run("cpu"));
  Op::Args a = p.args();
  a.d_out = {};
  expect_error(run_op<Op>(p.d, a), bad, op + "d_out: null, expected f32 [3,2,4]");
  a = p.args();
  a.d_q.data = const_cast<void*>(a.q.data);
  expect_error(run_op<Op>(p.d, a), bad, op + "d_q: overlaps q, expected memory of its own");
  a = p.args();
  a.d_k = a.d_v;
  expect_error(run_op<Op>(p.d, a), bad, op + "d_v: overlaps d_k, expected memory of its own");
  a = p.args();
  a.cu_seqlens = {};
  expect_error(run_op<Op>(p.d, a), bad, op + "cu_seqlens: null, expected s32 [3]");
  a = p.args();
  a.k.stride[2] = 2;
  expect_error(run_op<Op>(p.d, a), Code::unsupported, op + "k: stride 2 of axis 2, expected 1");
  const auto plan = Plan<Op>::select(p.d, {}, Preference::exact, "cpu", 1);
  expect_error(
      plan->run(p.args()), bad,
      op + "workspace: 0 bytes, expected at least " + std::to_string(plan->workspace_bytes()));
}

}  // namespace
}  // namespace bittern
