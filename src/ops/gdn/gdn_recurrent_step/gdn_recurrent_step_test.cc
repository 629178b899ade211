#include "core/numerics.h"
#include "oracle/op_test.h"
#include "oracle/oracle_impl.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using oracle::expect_error;
using oracle::expect_ok;
using oracle::kBothKernels;
using oracle::run_op;
using Op = GdnRecurrentStep;
using Floats = std::vector<float>;

TEST(GdnRecurrentStep, MatchesRefEverywhere) { oracle::expect_parity("gdn_recurrent_step"); }

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// An f32 problem with values such as a model has, and its result.
struct Problem {
  GdnStepDesc d;
  Floats q, k, v, g, beta, a_log, dt_bias, state, o, snapshots;
  std::vector<std::int32_t> index;

  explicit Problem(const GdnStepDesc& desc, std::uint64_t seed = 1) : d(desc) {
    oracle::Rng rng(seed);
    const auto fill = [&](Floats& x, const Shape& shape, auto make) {
      for (std::int64_t i = 0; i < shape.numel(); ++i) x.push_back(static_cast<float>(make()));
    };
    const auto normal = [&] { return rng.normal(); };
    const GdnDesc h = d.heads();
    fill(q, h.key_shape(), normal);
    fill(k, h.key_shape(), normal);
    fill(v, h.value_shape(), normal);
    fill(g, h.gate_shape(), [&] { return d.gate ? rng.normal() : -rng.uniform(); });
    fill(beta, h.gate_shape(), [&] { return d.beta_sigmoid ? rng.normal() : rng.uniform(); });
    fill(a_log, {d.value_heads}, normal);
    fill(dt_bias, {d.value_heads}, normal);
    fill(state, d.state_shape(), normal);
    for (std::int64_t s = 0; s < d.batch; ++s)
      index.push_back(static_cast<std::int32_t>(d.pool - 1 - s));
    o.resize(v.size(), NAN);
    snapshots.resize(at(d.snapshot_shape().numel()), NAN);
    if (!d.qk_l2norm)  // states must not explode
      for (Floats* x : {&q, &k})
        for (float& e : *x) e /= static_cast<float>(std::sqrt(static_cast<double>(d.key_dim)));
  }

  Op::Args args() {
    const GdnDesc h = d.heads();
    const auto read = [](const auto& x, const Shape& shape) { return view(x.data(), shape); };
    return {.q = read(std::as_const(q), h.key_shape()),
            .k = read(std::as_const(k), h.key_shape()),
            .v = read(std::as_const(v), h.value_shape()),
            .g = read(std::as_const(g), h.gate_shape()),
            .beta = read(std::as_const(beta), h.gate_shape()),
            .a_log = d.gate ? read(std::as_const(a_log), {d.value_heads}) : ConstView{},
            .dt_bias = d.gate ? read(std::as_const(dt_bias), {d.value_heads}) : ConstView{},
            .state_index = d.pool > 0 ? read(std::as_const(index), {d.batch}) : ConstView{},
            .state = view(state.data(), d.state_shape()),
            .o = view(o.data(), h.value_shape()),
            .snapshots = view(snapshots.data(), d.snapshot_shape())};
  }
  void run(std::string_view kernel = {}) { expect_ok(run_op<Op>(d, args(), kernel)); }
};

// The definition, in f64 and in its textbook form: returns o, updates state.
std::vector<double> recurrence(const Problem& p, std::vector<double>& state) {
  const GdnStepDesc& d = p.d;
  const GdnDesc h = d.heads();
  std::vector<double> o(p.v.size());
  const double scale = d.scale != 0 ? d.scale : 1 / std::sqrt(static_cast<double>(d.key_dim));
  for (std::int64_t s = 0; s < d.batch; ++s) {
    for (std::int64_t head = 0; head < d.value_heads; ++head) {
      const std::int64_t slot = d.pool > 0 ? p.index[at(s)] : s;
      double* const base = state.data() + (slot * d.value_heads + head) * d.key_dim * d.value_dim;
      const auto S = [&](std::int64_t i, std::int64_t j) -> double& {
        return base[d.state_layout == StateLayout::key_value ? i * d.value_dim + j
                                                             : j * d.key_dim + i];
      };
      for (std::int64_t token = s * d.tokens; token < (s + 1) * d.tokens; ++token) {
        const auto key = [&](const Floats& x, double factor) {
          std::vector<double> out;
          double squares = 0;
          for (std::int64_t i = 0; i < d.key_dim; ++i) {
            out.push_back(x[at((token * d.key_heads + h.key_head(head)) * d.key_dim + i)]);
            squares += out.back() * out.back();
          }
          if (d.qk_l2norm) factor /= std::sqrt(squares + 1e-6);
          for (double& e : out) e *= factor;
          return out;
        };
        const auto q = key(p.q, scale), k = key(p.k, 1);
        const std::size_t gate = at(token * d.value_heads + head);
        double g = p.g[gate], beta = p.beta[gate];
        if (d.gate)
          g = -std::exp(static_cast<double>(p.a_log[at(head)])) *
              std::log1p(std::exp(g + static_cast<double>(p.dt_bias[at(head)])));
        if (d.beta_sigmoid) beta = 1 / (1 + std::exp(-beta));
        if (d.allow_neg_eigval) beta *= 2;
        for (std::int64_t j = 0; j < d.value_dim; ++j) {
          double read = 0;
          for (std::int64_t i = 0; i < d.key_dim; ++i) read += (S(i, j) *= std::exp(g)) * k[at(i)];
          const std::size_t out = gate * at(d.value_dim) + at(j);
          const double delta = beta * (static_cast<double>(p.v[out]) - read);
          for (std::int64_t i = 0; i < d.key_dim; ++i)
            o[out] += (S(i, j) += k[at(i)] * delta) * q[at(i)];
        }
      }
    }
  }
  return o;
}

double relative_error(const Floats& got, const std::vector<double>& want) {
  double error = 0, size = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    error += std::pow(static_cast<double>(got[i]) - want[i], 2);
    size += want[i] * want[i];
  }
  return std::sqrt(error / size);
}

constexpr GdnStepDesc kModel{.batch = 2,
                             .tokens = 4,
                             .key_heads = 2,
                             .value_heads = 6,
                             .key_dim = 64,
                             .value_dim = 32,
                             .pool = 3,
                             .qk_l2norm = true,
                             .gate = true,
                             .beta_sigmoid = true,
                             .allow_neg_eigval = true};

TEST(GdnRecurrentStep, IsTheRecurrence) {
  for (const HeadMap map : {HeadMap::grouped, HeadMap::tiled}) {
    for (const StateLayout layout : {StateLayout::key_value, StateLayout::value_key}) {
      for (const bool fused : {true, false}) {
        GdnStepDesc d = kModel;
        d.head_map = map;
        d.state_layout = layout;
        if (!fused) d.qk_l2norm = d.gate = d.beta_sigmoid = d.allow_neg_eigval = false;
        Problem p(d);
        std::vector<double> state(p.state.begin(), p.state.end());
        const auto o = recurrence(p, state);
        p.run();
        EXPECT_LT(relative_error(p.o, o), 1e-6);
        EXPECT_LT(relative_error(p.state, state), 1e-6);
      }
    }
  }
}

TEST(GdnRecurrentStep, ByHand) {
  // One key of length 2 and one value: S = (2, 4), k = (1, 0), q = (3, 1), v = 5, e^g = 1, beta
  // 1/2. d = (5 - 2) / 2 = 1.5, S = (3.5, 4), o = 3 * 3.5 + 4.
  const GdnStepDesc d{.batch = 1, .key_dim = 2, .value_dim = 1, .scale = 1};
  const float q[] = {3, 1}, k[] = {1, 0}, v = 5, g = 0, beta = 0.5f;
  for (const auto kernel : kBothKernels) {
    float state[] = {2, 4}, o = NAN, snapshot[2] = {};
    expect_ok(run_op<Op>(d,
                         {.q = view(q, {1, 1, 1, 2}),
                          .k = view(k, {1, 1, 1, 2}),
                          .v = view(&v, {1, 1, 1, 1}),
                          .g = view(&g, {1, 1, 1}),
                          .beta = view(&beta, {1, 1, 1}),
                          .state = view(state, {1, 1, 2, 1}),
                          .o = view(&o, {1, 1, 1, 1}),
                          .snapshots = view(snapshot, {1, 1, 1, 2, 1})},
                         kernel));
    EXPECT_EQ(o, 14.5f);
    EXPECT_EQ(state[0], 3.5f);
    EXPECT_EQ(state[1], 4.0f);
    EXPECT_EQ(snapshot[0], 3.5f);
  }
}

// Tokens one call at a time, or together: the same bits; and each snapshot is the state in between.
TEST(GdnRecurrentStep, TokensTogetherAreTokensInTurn) {
  for (const StateLayout layout : {StateLayout::key_value, StateLayout::value_key}) {
    GdnStepDesc d = kModel;
    d.batch = 1;
    d.pool = 0;
    d.state_layout = layout;
    Problem together(d);
    Floats state = together.state;
    together.run();
    GdnStepDesc one = d;
    one.tokens = 1;
    const GdnDesc h = one.heads();
    const std::int64_t keys = h.key_shape().numel(), values = h.value_shape().numel();
    for (std::int64_t t = 0; t < d.tokens; ++t) {
      Problem p(one);
      p.state = state;
      Op::Args a = p.args();
      a.q.data = together.q.data() + t * keys;
      a.k.data = together.k.data() + t * keys;
      a.v.data = together.v.data() + t * values;
      a.g.data = together.g.data() + t * d.value_heads;
      a.beta.data = together.beta.data() + t * d.value_heads;
      a.a_log.data = together.a_log.data();
      a.dt_bias.data = together.dt_bias.data();
      expect_ok(run_op<Op>(one, a));
      state = p.state;
      EXPECT_TRUE(std::equal(p.o.begin(), p.o.end(), together.o.begin() + t * values));
      const auto n = static_cast<std::int64_t>(state.size());
      EXPECT_TRUE(std::equal(state.begin(), state.end(), together.snapshots.begin() + t * n));
    }
    EXPECT_EQ(state, together.state);
  }
}

TEST(GdnRecurrentStep, TouchesOnlyTheStatesItPicks) {
  Problem p(kModel);
  const Floats before = p.state;
  p.run();
  const std::size_t n = p.state.size() / 3;  // sequences 0 and 1 use states 2 and 1
  EXPECT_TRUE(
      std::equal(before.begin(), before.begin() + static_cast<std::ptrdiff_t>(n), p.state.begin()));
  EXPECT_NE(p.state[n], before[n]);
  EXPECT_NE(p.state[2 * n], before[2 * n]);
}

// A NaN in one sequence's token stays in that sequence.
TEST(GdnRecurrentStep, SequencesDoNotSeeEachOther) {
  GdnStepDesc d = kModel;
  d.pool = 0;
  Problem clean(d), dirty(d);
  std::fill_n(dirty.k.begin(), dirty.k.size() / 2, NAN);
  clean.run();
  dirty.run();
  const auto half = static_cast<std::ptrdiff_t>(clean.o.size() / 2);
  EXPECT_TRUE(std::equal(clean.o.begin() + half, clean.o.end(), dirty.o.begin() + half));
  EXPECT_TRUE(std::isnan(dirty.o[0]));
}

TEST(GdnRecurrentStep, ExtremeGatesGiveNoNaN) {
  GdnStepDesc d = kModel;
  d.gate = d.beta_sigmoid = d.allow_neg_eigval = false;
  for (const float g : {-INFINITY, -3e38f, -1e4f, -104.0f, -88.0f, 0.0f}) {
    Problem p(d);
    std::fill(p.g.begin(), p.g.end(), g);
    std::fill(p.beta.begin(), p.beta.end(), 2.0f);
    std::fill_n(p.k.begin(), d.key_dim, 0.0f);  // a zero key normalises to zero
    p.run();
    for (const float x : p.o) EXPECT_TRUE(std::isfinite(x));
    for (const float x : p.state) EXPECT_TRUE(std::isfinite(x));
  }
}

// The host cannot look at a device's indices: one out of range is passed over.
TEST(GdnRecurrentStep, OnTheGpuAnIndexOutOfRangeTouchesNothing) {
  BITTERN_NEEDS_CUDA();
  constexpr Device kGpu{Device::Type::cuda, 0};
  for (const StateLayout layout : {StateLayout::key_value, StateLayout::value_key}) {
    for (const std::int32_t wrong : {-2, 4, INT32_MAX, INT32_MIN}) {
      const GdnStepDesc d{.batch = 3,
                          .value_heads = 2,
                          .key_dim = 8,
                          .value_dim = 40,
                          .pool = 4,
                          .state_layout = layout};
      auto whole = oracle::make_problem<Op>(d, 1, {});
      auto broken = oracle::make_problem<Op>(d, 1, {});
      const std::int64_t slot = whole.args.state_index.as<std::int32_t>()[1];
      oracle::data<std::int32_t>(broken.args.state_index)[1] = wrong;
      const auto before = oracle::make_problem<Op>(d, 1, {});
      const auto plan = Plan<Op>::select(d, kGpu);
      ASSERT_TRUE(plan.ok()) << plan.status().message();
      for (auto* p : {&whole, &broken})
        expect_ok(oracle::run_on(
            kGpu, *p, 0, [&](const auto& args, Workspace w) { return plan->run(args, {}, w); }));
      const auto same = [](const MutView& a, const MutView& b, std::int64_t row, const char* what) {
        const std::int64_t n = a.shape.numel() / a.shape[0];
        EXPECT_EQ(std::memcmp(a.as<float>() + row * n, b.as<float>() + row * n,
                              static_cast<std::size_t>(n) * sizeof(float)),
                  0)
            << what << " " << row;
      };
      for (std::int64_t s = 0; s < 3; ++s)
        same(broken.args.o, s == 1 ? before.args.o : whole.args.o, s, "o");
      for (std::int64_t s = 0; s < 4; ++s)
        same(broken.args.state, s == slot ? before.args.state : whole.args.state, s, "state");
    }
  }
}

// An index of -1: zeros, whatever the sequence's tokens hold, and no state is touched by it.
TEST(GdnRecurrentStep, SkipsSequencesWithoutAState) {
  for (const std::string_view kernel : oracle::kBothKernels) {
    for (const StateLayout layout : {StateLayout::key_value, StateLayout::value_key}) {
      GdnStepDesc d = kModel;
      d.state_layout = layout;
      Problem all(d), some(d);
      all.index = {2, 0};
      some.index = {2, -1};
      for (float& x : some.q) x = &x < some.q.data() + some.q.size() / 2 ? x : NAN;
      const Floats before = some.state;
      expect_ok(run_op<Op>(d, all.args(), kernel));
      expect_ok(run_op<Op>(d, some.args(), kernel));
      const auto n = static_cast<std::ptrdiff_t>(some.state.size() / 3);
      EXPECT_TRUE(std::equal(before.begin(), before.begin() + 2 * n, some.state.begin()));
      EXPECT_TRUE(
          std::equal(all.state.begin() + 2 * n, all.state.end(), some.state.begin() + 2 * n));
      for (const auto& [ours, theirs] :
           {std::pair{&some.o, &all.o}, std::pair{&some.snapshots, &all.snapshots}}) {
        const auto half = static_cast<std::ptrdiff_t>(ours->size() / 2);
        EXPECT_TRUE(std::equal(ours->begin(), ours->begin() + half, theirs->begin()));
        for (auto x = ours->begin() + half; x != ours->end(); ++x) EXPECT_EQ(*x, 0);
      }
    }
  }
  GdnStepDesc few = kModel;  // a pool smaller than the batch serves those that have a state
  few.pool = 1;
  Problem p(few);
  p.index = {-1, 0};
  expect_ok(run_op<Op>(few, p.args()));
}

TEST(GdnRecurrentStep, ErrorsNameWhatIsWrong) {
  const Code bad = Code::invalid_argument;
  const std::string op = "gdn_recurrent_step: ";
  const auto with = [](auto change) {
    GdnStepDesc d = kModel;
    change(d);
    return Op::check(d);
  };
  using Desc = GdnStepDesc&;
  expect_error(with([](Desc d) { d.batch = -1; }), bad, op + "batch: -1, expected at least 0");
  expect_error(with([](Desc d) { d.value_heads = 5; }), bad,
               op + "value_heads: 5, expected a multiple of key_heads 2");
  expect_error(with([](Desc d) { d.key_dim = 257; }), bad, op + "key_dim: 257, expected 1..256");
  expect_error(with([](Desc d) { d.pool = -1; }), bad, op + "pool: -1, expected 0..2147483647");
  expect_error(with([](Desc d) { d.beta_sigmoid = false; }), bad,
               op + "allow_neg_eigval: true, expected false without beta_sigmoid");
  expect_error(with([](Desc d) { d.element = DType::f64; }), Code::unsupported,
               op + "element: f64, expected f32, f16 or bf16");

  Problem p(kModel);
  const Floats before = p.state;
  const auto operand = [&](auto change) {
    Op::Args a = p.args();
    change(a);
    return run_op<Op>(kModel, a);
  };
  using Args = Op::Args&;
  expect_error(operand([](Args a) { a.a_log = {}; }), bad, op + "a_log: null, expected f32 [6]");
  expect_error(operand([](Args a) { a.state = {}; }), bad,
               op + "state: null, expected f32 [3,6,64,32]");
  expect_error(operand([](Args a) { a.state_index = {}; }), bad,
               op + "state_index: null, expected s32 [2]");
  p.index = {0, 3};
  expect_error(operand([](Args) {}), bad,
               op + "state_index: [1] is 3, expected 0..2, or -1 to skip the sequence");
  p.index = {0, -2};
  expect_error(operand([](Args) {}), bad,
               op + "state_index: [1] is -2, expected 0..2, or -1 to skip the sequence");
  p.index = {2, 2};
  expect_error(operand([](Args) {}), bad,
               op + "state_index: [1] is 2, expected a state other than that of [0]");
  EXPECT_EQ(p.state, before);
}

// The pool is a server's, the batch one step's: a check of the indices that takes memory for each
// state would cost more than the step, and here 16 GiB.
TEST(GdnRecurrentStep, ChecksTheIndicesOfALargePoolByTheBatch) {
  const GdnStepDesc d{.batch = 3, .key_dim = 1, .value_dim = 1, .pool = INT32_MAX};
  const auto plan = Plan<Op>::select(d);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  const Floats in(3);
  Floats o(3);
  std::vector<std::int32_t> index{INT32_MAX - 1, -1, 0};
  const ConstView rows = view(in.data(), {3, 1, 1, 1}), gates = view(in.data(), {3, 1, 1});
  Op::Args a;
  a.q = a.k = a.v = rows;
  a.g = a.beta = gates;
  a.state_index = view(std::as_const(index).data(), {3});
  // Never read.
  a.state = view(reinterpret_cast<float*>(std::uintptr_t{1} << 44), {INT32_MAX, 1, 1, 1});
  a.o = view(o.data(), {3, 1, 1, 1});
  expect_ok(plan->can_implement(a));
  index = {7, INT32_MAX - 1, 7};
  expect_error(
      plan->can_implement(a), Code::invalid_argument,
      "gdn_recurrent_step: state_index: [2] is 7, expected a state other than that of [0]");
}

}  // namespace
}  // namespace bittern
