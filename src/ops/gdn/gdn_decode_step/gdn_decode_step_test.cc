#include "core/numerics.h"
#include "ops/gdn/gdn_test.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using oracle::expect_error;
using oracle::expect_ok;
using oracle::get;
using oracle::kBothKernels;
using oracle::put;
using oracle::run_problem;
using oracle::values;
using Op = GdnDecodeStep;
using Problem = oracle::Problem<Op>;
using Doubles = std::vector<double>;

TEST(GdnDecodeStep, MatchesRefEverywhere) { oracle::expect_parity("gdn_decode_step"); }

constexpr GdnDecodeDesc kModel{.batch = 2,
                               .tokens = 3,
                               .key_heads = 2,
                               .value_heads = 6,
                               .key_dim = 16,
                               .value_dim = 24,
                               .pool = 3};

// Values such as a model has; sequence s has state pool - 1 - s.
Problem make(const GdnDecodeDesc& d, std::uint64_t seed = 1) {
  Problem p = oracle::make_problem<Op>(d, seed, {}, false);
  oracle::Rng rng(seed);
  Op::operands(d, p.args, [&](const char*, const auto& view, const Operand& o) {
    if (o.dtype == DType::s32 || !view) return;
    for (std::int64_t i = 0; i < view.shape.numel(); ++i) put(view, i, rng.normal());
  });
  for (std::int64_t s = 0; s < d.batch && d.pool > 0; ++s)
    put(p.args.state_index, s, static_cast<double>(d.pool - 1 - s));
  return p;
}

std::int64_t slot_of(const Problem& p, std::int64_t sequence) {
  return p.desc.pool > 0 ? static_cast<std::int64_t>(get(p.args.state_index, sequence)) : sequence;
}

// Row `row` of the first axis.
template <class View>
Doubles row_of(const View& view, std::int64_t row) {
  const Doubles all = values(view);
  const auto n = static_cast<std::ptrdiff_t>(all.size()) / view.shape[0];
  return {all.begin() + row * n, all.begin() + (row + 1) * n};
}
template <class View>
Doubles gather(const Problem& p, const View& states) {
  Doubles all;
  for (std::int64_t s = 0; s < p.desc.batch; ++s) {
    const Doubles one = row_of(states, slot_of(p, s));
    all.insert(all.end(), one.begin(), one.end());
  }
  return all;
}
// [rows, channels] -> channels [first, first + count) of each.
Doubles columns(const Doubles& x, std::int64_t channels, std::int64_t first, std::int64_t count) {
  Doubles out;
  for (auto row = x.begin(); row != x.end(); row += channels)
    out.insert(out.end(), row + first, row + first + count);
  return out;
}

// y and both states of the three ops one after the other.
struct Result {
  Doubles y, conv_state, state;
};
Result composed(const Problem& p, std::string_view kernel) {
  const GdnDecodeDesc& d = p.desc;
  auto conv = oracle::make_problem<CausalConv1d>({.batch = d.batch,
                                                  .tokens = d.tokens,
                                                  .channels = d.channels(),
                                                  .width = d.width,
                                                  .element = d.element},
                                                 1, {}, false);
  oracle::set_values(conv.args.x, values(p.args.x));
  oracle::set_values(conv.args.weight, values(p.args.conv_weight));
  oracle::set_values(conv.args.bias, values(p.args.conv_bias));
  oracle::set_values(conv.args.initial_state, gather(p, p.args.conv_state));
  oracle::set_all(conv.args.mask, 1);
  expect_ok(run_problem(conv, kernel));
  const Doubles mixed = values(conv.args.y);

  GdnStepDesc rule = d.step();
  rule.pool = 0;
  auto step = oracle::make_problem<GdnRecurrentStep>(rule, 1, {}, false);
  const std::int64_t keys = d.key_heads * d.key_dim, all = d.channels();
  oracle::set_values(step.args.q, columns(mixed, all, 0, keys));
  oracle::set_values(step.args.k, columns(mixed, all, keys, keys));
  oracle::set_values(step.args.v, columns(mixed, all, 2 * keys, all - 2 * keys));
  oracle::set_values(step.args.g, values(p.args.g));
  oracle::set_values(step.args.beta, values(p.args.beta));
  oracle::set_values(step.args.a_log, values(p.args.a_log));
  oracle::set_values(step.args.dt_bias, values(p.args.dt_bias));
  oracle::set_values(step.args.state, gather(p, p.args.state));
  expect_ok(run_problem(step, kernel));

  auto norm = oracle::make_problem<GatedRmsNorm>({.rows = d.batch * d.tokens * d.value_heads,
                                                  .dim = d.value_dim,
                                                  .eps = d.eps,
                                                  .element = d.element,
                                                  .rounding = d.rounding},
                                                 1, {}, false);
  oracle::set_values(norm.args.x, values(step.args.o));
  oracle::set_values(norm.args.z, values(p.args.z));
  oracle::set_values(norm.args.weight, values(p.args.norm_weight));
  expect_ok(run_problem(norm, kernel));
  return {values(norm.args.y), values(conv.args.final_state), values(step.args.state)};
}

TEST(GdnDecodeStep, IsTheThreeOpsOneAfterTheOther) {
  std::uint64_t seed = 0;
  for (const DType element : {DType::f32, DType::bf16, DType::f16}) {
    for (const StateLayout layout : {StateLayout::key_value, StateLayout::value_key}) {
      for (const std::int32_t width : {2, 3, 4}) {
        GdnDecodeDesc d = kModel;
        d.element = element;
        d.state_layout = layout;
        d.width = width;
        d.head_map = width == 3 ? HeadMap::tiled : HeadMap::grouped;
        d.rounding = width == 2 ? NormRounding::each : NormRounding::once;
        d.allow_neg_eigval = width == 4;
        for (const auto kernel : kBothKernels) {
          Problem p = make(d, ++seed);
          const Result want = composed(p, kernel);
          expect_ok(run_problem(p, kernel));
          EXPECT_EQ(values(p.args.y), want.y) << kernel;
          EXPECT_EQ(gather(p, p.args.conv_state), want.conv_state) << kernel;
          EXPECT_EQ(gather(p, p.args.state), want.state) << kernel;
        }
      }
    }
  }
}

double silu(double x) { return x / (1 + std::exp(-x)); }

// The layer in f64 and in its textbook form.
TEST(GdnDecodeStep, IsTheLayer) {
  GdnDecodeDesc d = kModel;
  d.pool = 0;
  Problem p = make(d);
  const auto in = [](const auto& view, std::int64_t i) { return get(view, i); };
  const Op::Args& a = p.args;
  const std::int64_t channels = d.channels(), reach = d.width - 1, heads = d.value_heads;
  Doubles mixed;
  for (std::int64_t t = 0; t < d.batch * d.tokens; ++t) {
    for (std::int64_t c = 0; c < channels; ++c) {
      double u = in(a.conv_bias, c);
      const std::int64_t s = t / d.tokens, at = t % d.tokens;
      for (std::int64_t j = 0; j < d.width; ++j) {
        const std::int64_t from = at - reach + j;
        const double x = from < 0 ? in(a.conv_state, (s * channels + c) * reach + from + reach)
                                  : in(a.x, (s * d.tokens + from) * channels + c);
        u += in(a.conv_weight, c * d.width + j) * x;
      }
      mixed.push_back(silu(u));
    }
  }
  const std::int64_t keys = d.key_heads * d.key_dim;
  oracle::GdnValues v{columns(mixed, channels, 0, keys),
                      columns(mixed, channels, keys, keys),
                      columns(mixed, channels, 2 * keys, channels - 2 * keys),
                      values(a.g),
                      values(a.beta),
                      values(a.state)};
  for (Doubles* x : {&v.q, &v.k}) {
    for (auto row = x->begin(); row != x->end(); row += d.key_dim) {
      double squares = 1e-6;
      for (auto e = row; e != row + d.key_dim; ++e) squares += *e * *e;
      for (auto e = row; e != row + d.key_dim; ++e) *e /= std::sqrt(squares);
    }
  }
  for (std::size_t i = 0; i < v.g.size(); ++i) {
    const auto head = static_cast<std::int64_t>(i) % heads;
    v.g[i] = -std::exp(in(a.a_log, head)) * std::log1p(std::exp(v.g[i] + in(a.dt_bias, head)));
    v.beta[i] = 1 / (1 + std::exp(-v.beta[i]));
  }
  const auto want = oracle::gdn_recurrence(d.step().heads(), {0, d.tokens, d.batch * d.tokens}, v);
  Doubles y;
  for (auto row = want.o.begin(); row != want.o.end(); row += d.value_dim) {
    double squares = 0;
    for (auto e = row; e != row + d.value_dim; ++e) squares += *e * *e;
    for (std::int64_t j = 0; j < d.value_dim; ++j) {
      const double z = in(a.z, static_cast<std::int64_t>(y.size()));
      y.push_back(row[j] / std::sqrt(squares / static_cast<double>(d.value_dim) + d.eps) *
                  in(a.norm_weight, j) * silu(z));
    }
  }
  expect_ok(run_problem(p));
  EXPECT_LT(oracle::rms_ratio(values(p.args.y), y), 2e-6);
  EXPECT_LT(oracle::rms_ratio(values(p.args.state), want.final_state), 1e-6);
}

// No weights: q, k and v are 0, so the state only decays, and y is 0. With g = dt_bias = a_log = 0
// the decay is e^-ln 2.
TEST(GdnDecodeStep, ByHand) {
  const GdnDecodeDesc d{.batch = 1, .key_dim = 1, .value_dim = 2};
  for (const auto kernel : kBothKernels) {
    Problem p = make(d);
    for (const ConstView* x :
         {&p.args.conv_weight, &p.args.conv_bias, &p.args.g, &p.args.a_log, &p.args.dt_bias})
      oracle::set_all(*x, 0);
    oracle::set_values(p.args.x, {1, 2, 3, 4});
    oracle::set_values(p.args.conv_state, {10, 11, 12, 20, 21, 22, 30, 31, 32, 40, 41, 42});
    oracle::set_values(p.args.state, {8, -2});
    expect_ok(run_problem(p, kernel));
    EXPECT_EQ(values(p.args.y), (Doubles{0, 0}));
    EXPECT_EQ(values(p.args.conv_state), (Doubles{11, 12, 1, 21, 22, 2, 31, 32, 3, 41, 42, 4}));
    EXPECT_EQ(values(p.args.conv_snapshots), values(p.args.conv_state));
    EXPECT_NEAR(get(p.args.state, 0), 4, 1e-6);
    EXPECT_NEAR(get(p.args.state, 1), -1, 1e-6);
    EXPECT_EQ(values(p.args.snapshots), values(p.args.state));
  }
}

// Tokens one call at a time, or together: the same bits; and the snapshots are the states in
// between.
TEST(GdnDecodeStep, TokensTogetherAreTokensInTurn) {
  for (const StateLayout layout : {StateLayout::key_value, StateLayout::value_key}) {
    GdnDecodeDesc d = kModel;
    d.batch = 1;
    d.pool = 0;
    d.tokens = Op::kMostTokens;
    d.state_layout = layout;
    Problem together = make(d);
    GdnDecodeDesc one = d;
    one.tokens = 1;
    Problem p = make(one);  // of another token; what all tokens share is copied
    for (const auto member : {&Op::Args::conv_weight, &Op::Args::norm_weight, &Op::Args::a_log,
                              &Op::Args::dt_bias, &Op::Args::conv_bias})
      oracle::set_values(p.args.*member, values(together.args.*member));
    oracle::set_values(p.args.conv_state, values(together.args.conv_state));
    oracle::set_values(p.args.state, values(together.args.state));
    expect_ok(run_problem(together));
    const auto token = [&](const auto& view, std::int64_t t) {
      const Doubles all = values(view);
      const auto n = static_cast<std::ptrdiff_t>(all.size()) / d.tokens;
      return Doubles(all.begin() + t * n, all.begin() + (t + 1) * n);
    };
    for (std::int64_t t = 0; t < d.tokens; ++t) {
      for (const auto member : {&Op::Args::x, &Op::Args::z, &Op::Args::g, &Op::Args::beta})
        oracle::set_values(p.args.*member, token(together.args.*member, t));
      expect_ok(run_problem(p));
      EXPECT_EQ(values(p.args.y), token(together.args.y, t));
      EXPECT_EQ(values(p.args.state), token(together.args.snapshots, t));
      EXPECT_EQ(values(p.args.conv_state), token(together.args.conv_snapshots, t));
    }
    EXPECT_EQ(values(p.args.state), values(together.args.state));
    EXPECT_EQ(values(p.args.conv_state), values(together.args.conv_state));
  }
}

// An index of -1: zeros, whatever the sequence's tokens hold, and its state is as it was.
TEST(GdnDecodeStep, SkipsSequencesWithoutAState) {
  for (const auto kernel : kBothKernels) {
    Problem all = make(kModel), some = make(kModel);
    put(some.args.state_index, 1, -1);
    for (std::int64_t i = some.args.x.shape.numel() / 2; i < some.args.x.shape.numel(); ++i)
      put(some.args.x, i, NAN);
    const Doubles state = row_of(some.args.state, 1), conv = row_of(some.args.conv_state, 1);
    expect_ok(run_problem(all, kernel));
    expect_ok(run_problem(some, kernel));
    EXPECT_EQ(row_of(some.args.state, 1), state);
    EXPECT_EQ(row_of(some.args.conv_state, 1), conv);
    EXPECT_EQ(row_of(some.args.state, 2), row_of(all.args.state, 2));
    EXPECT_EQ(row_of(some.args.conv_state, 2), row_of(all.args.conv_state, 2));
    const auto rows = [&](const auto& ours, const auto& theirs) {
      EXPECT_EQ(row_of(ours, 0), row_of(theirs, 0));
      for (const double e : row_of(ours, 1)) EXPECT_EQ(e, 0);
    };
    rows(some.args.y, all.args.y);
    rows(some.args.snapshots, all.args.snapshots);
    rows(some.args.conv_snapshots, all.args.conv_snapshots);
    // The state that nobody uses.
    EXPECT_EQ(row_of(all.args.state, 0), row_of(make(kModel).args.state, 0));
    EXPECT_EQ(row_of(all.args.conv_state, 0), row_of(make(kModel).args.conv_state, 0));
  }
}

TEST(GdnDecodeStep, SequencesDoNotSeeEachOther) {
  Problem clean = make(kModel), dirty = make(kModel);
  put(dirty.args.x, 0, NAN);
  expect_ok(run_problem(clean));
  expect_ok(run_problem(dirty));
  EXPECT_EQ(row_of(clean.args.y, 1), row_of(dirty.args.y, 1));
  EXPECT_EQ(row_of(clean.args.state, 1), row_of(dirty.args.state, 1));
  EXPECT_TRUE(std::isnan(get(dirty.args.y, 0)));
}

// The host cannot look at a device's indices: one out of range is passed over.
TEST(GdnDecodeStep, OnTheGpuAnIndexOutOfRangeTouchesNothing) {
  BITTERN_NEEDS_CUDA();
  for (const StateLayout layout : {StateLayout::key_value, StateLayout::value_key}) {
    for (const int wrong : {-2, 3, INT32_MAX, INT32_MIN}) {
      GdnDecodeDesc d = kModel;
      d.state_layout = layout;
      Problem whole = make(d), broken = make(d);
      const Problem before = make(d);
      put(broken.args.state_index, 0, wrong);
      expect_ok(run_problem(whole, {}, Preference::exact, oracle::kGpu));
      expect_ok(run_problem(broken, {}, Preference::exact, oracle::kGpu));
      EXPECT_EQ(row_of(broken.args.y, 0), row_of(before.args.y, 0));
      EXPECT_EQ(row_of(broken.args.y, 1), row_of(whole.args.y, 1));
      for (std::int64_t s = 0; s < d.pool; ++s) {
        const Problem& want = s == 2 ? before : whole;
        EXPECT_EQ(row_of(broken.args.state, s), row_of(want.args.state, s));
        EXPECT_EQ(row_of(broken.args.conv_state, s), row_of(want.args.conv_state, s));
      }
    }
  }
}

TEST(GdnDecodeStep, ErrorsNameWhatIsWrong) {
  const Code bad = Code::invalid_argument;
  const std::string op = "gdn_decode_step: ";
  const auto with = [](auto change) {
    GdnDecodeDesc d = kModel;
    change(d);
    return Op::check(d);
  };
  using Desc = GdnDecodeDesc&;
  expect_error(with([](Desc d) { d.batch = -1; }), bad, op + "batch: -1, expected at least 0");
  expect_error(with([](Desc d) { d.tokens = 9; }), bad, op + "tokens: 9, expected 0..8");
  expect_error(with([](Desc d) { d.width = 5; }), bad, op + "width: 5, expected 2..4");
  expect_error(with([](Desc d) { d.value_heads = 5; }), bad,
               op + "value_heads: 5, expected a multiple of key_heads 2");
  expect_error(with([](Desc d) { d.pool = -1; }), bad, op + "pool: -1, expected 0..2147483647");
  expect_error(with([](Desc d) { d.eps = -1; }), bad,
               op + "eps: -1, expected a number that is finite in f32 and at least 0");
  expect_error(with([](Desc d) { d.rounding = static_cast<NormRounding>(2); }), bad,
               op + "rounding: 2, expected 0..1");
  expect_error(with([](Desc d) { d.element = DType::f64; }), Code::unsupported,
               op + "element: f64, expected f32, f16 or bf16");

  const auto operand = [&](auto change) {
    Problem q = make(kModel);
    change(q.args);
    return oracle::run_op<Op>(kModel, q.args);
  };
  using Args = Op::Args&;
  expect_error(operand([](Args a) { a.a_log = {}; }), bad, op + "a_log: null, expected f32 [6]");
  expect_error(operand([](Args a) { a.conv_state = {}; }), bad,
               op + "conv_state: null, expected f32 [3,208,3]");
  expect_error(operand([](Args a) { a.state_index = {}; }), bad,
               op + "state_index: null, expected s32 [2]");
  expect_error(operand([](Args a) { put(a.state_index, 1, 3); }), bad,
               op + "state_index: [1] is 3, expected 0..2, or -1 to skip the sequence");
  expect_error(operand([](Args a) { put(a.state_index, 1, 2); }), bad,
               op + "state_index: [1] is 2, expected a state other than that of [0]");
}

}  // namespace
}  // namespace bittern
