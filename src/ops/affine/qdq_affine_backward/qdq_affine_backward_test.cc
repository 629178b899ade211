#include "oracle/op_test.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using oracle::expect_error;
using oracle::expect_ok;
using oracle::kBothKernels;
using oracle::run_op;
using Op = QdqAffineBackward;

TEST(QdqAffineBackward, MatchesRefEverywhere) { oracle::expect_parity("qdq_affine_backward"); }

struct Sums {
  float scale = NAN, bias = NAN;
};
Sums sums(const std::vector<std::uint8_t>& q, const std::vector<float>& d_y,
          std::string_view kernel) {
  const auto n = static_cast<std::int64_t>(q.size());
  const AffineDesc d{.outer_size = 1, .axis_size = n, .group_size = n, .bits = 8};
  Sums out;
  expect_ok(run_op<Op>(d,
                       {view(d_y.data(), {1, n}), view(q.data(), {1, n}), view(&out.scale, {1, 1}),
                        view(&out.bias, {1, 1})},
                       kernel));
  return out;
}

TEST(QdqAffineBackward, SumsByHand) {
  for (const auto kernel : kBothKernels) {
    const Sums s = sums({1, 2, 3, 4}, {0.5f, 1, -1, 2}, kernel);
    EXPECT_EQ(s.scale, 7.5f);
    EXPECT_EQ(s.bias, 2.5f);
  }
}

// From left to right 2^24 + 1 would lose the 1s: the sums would be 1, 0 and 0.
TEST(QdqAffineBackward, AddsInAHalvingTree) {
  constexpr float kBig = 0x1p24f;
  for (const auto kernel : kBothKernels) {
    EXPECT_EQ(sums({1, 1, 1, 1}, {kBig, 1, -kBig, 1}, kernel).bias, 2);
    EXPECT_EQ(sums({1, 1, 1}, {kBig, 1, -kBig}, kernel).bias, 1);
    EXPECT_EQ(sums({1, 1, 1, 1, 1}, {kBig, 1, 1, 1, -kBig}, kernel).bias, 3);
    EXPECT_EQ(sums({1, 1, 1, 1, 1}, {kBig, 1, 1, 1, -kBig}, kernel).scale, 3);
  }
}

// Padding is +0, and -0 + 0 = +0: a sum keeps its sign only where the tree adds no padding.
TEST(QdqAffineBackward, PaddingIsAdded) {
  for (const auto kernel : kBothKernels) {
    EXPECT_TRUE(std::signbit(sums({1, 1, 1, 1}, {-0.0f, -0.0f, -0.0f, -0.0f}, kernel).bias));
    EXPECT_FALSE(std::signbit(sums({1, 1, 1}, {-0.0f, -0.0f, -0.0f}, kernel).bias));
  }
}

// f64 problem with u8 or packed codes, run forwards and backwards.
struct Problem {
  AffineDesc d;
  std::vector<std::uint8_t> q;
  std::vector<double> d_y, d_scales, d_biases;

  explicit Problem(std::int64_t group)
      : d{.outer_size = 2,
          .axis_size = 3 * group,
          .group_size = group,
          .bits = 8,
          .element = DType::f64} {
    oracle::Rng rng(static_cast<std::uint64_t>(group));
    for (std::int64_t i = 0; i < d.outer_size * d.axis_size; ++i) {
      q.push_back(static_cast<std::uint8_t>(rng.below(256)));
      d_y.push_back(rng.normal());
    }
    d_scales.resize(6);
    d_biases.resize(6);
    expect_ok(run_op<Op>(
        d, {view(std::as_const(d_y).data(), d.tensor_shape()),
            view(std::as_const(q).data(), d.code_shape()), view(d_scales.data(), d.param_shape()),
            view(d_biases.data(), d.param_shape())}));
  }

  // <d_y, forward(s, b)>
  double loss(const std::vector<double>& s, const std::vector<double>& b) const {
    std::vector<double> y(d_y.size());
    expect_ok(run_op<QdqAffineForward>(
        d, {view(q.data(), d.code_shape()), view(s.data(), d.param_shape()),
            view(b.data(), d.param_shape()), view(y.data(), d.tensor_shape())}));
    long double sum = 0;
    for (std::size_t i = 0; i < y.size(); ++i) sum += static_cast<long double>(y[i]) * d_y[i];
    return static_cast<double>(sum);
  }
};

TEST(QdqAffineBackward, IsTheDerivativeOfTheForward) {
  constexpr double kStep = 0x1p-8;
  for (const std::int64_t group : {2, 3, 5, 48, 80, 96, 1000, 1024}) {
    const Problem p(group);
    const std::vector<double> s(6, 0.75), b(6, -1.5);
    const double tolerance = 1e-8 * static_cast<double>(group);
    for (std::size_t g = 0; g < 6; ++g) {
      const auto slope = [&](auto at) { return (at(kStep) - at(-kStep)) / (2 * kStep); };
      EXPECT_NEAR(p.d_scales[g], slope([&](double step) {
                    auto moved = s;
                    moved[g] += step;
                    return p.loss(moved, b);
                  }),
                  tolerance)
          << "group size " << group;
      EXPECT_NEAR(p.d_biases[g], slope([&](double step) {
                    auto moved = b;
                    moved[g] += step;
                    return p.loss(s, moved);
                  }),
                  tolerance)
          << "group size " << group;
    }
  }
}

// The forward is linear in (s, b), so <d_y, F(s, b)> = <d_scales, s> + <d_biases, b>.
TEST(QdqAffineBackward, IsTheAdjointOfTheForward) {
  for (const std::int64_t group : {2, 3, 5, 48, 80, 96, 1000, 1024}) {
    const Problem p(group);
    oracle::Rng rng(7);
    std::vector<double> s(6), b(6);
    long double right = 0, size = 0;
    for (std::size_t g = 0; g < 6; ++g) {
      s[g] = rng.normal();
      b[g] = rng.normal();
      const long double in_s = static_cast<long double>(p.d_scales[g]) * s[g];
      const long double in_b = static_cast<long double>(p.d_biases[g]) * b[g];
      right += in_s + in_b;
      size += std::abs(in_s) + std::abs(in_b);
    }
    EXPECT_NEAR(p.loss(s, b), static_cast<double>(right), 1e-12 * static_cast<double>(size))
        << "group size " << group;
  }
}

TEST(QdqAffineBackward, EitherOutputMayBeLeftOut) {
  const AffineDesc d{.outer_size = 1, .axis_size = 4, .group_size = 4, .bits = 8};
  const std::uint8_t q[] = {1, 2, 3, 4};
  const float d_y[] = {0.5f, 1, -1, 2};
  for (const auto kernel : kBothKernels) {
    float scale = NAN, bias = NAN;
    expect_ok(
        run_op<Op>(d, {view(d_y, {1, 4}), view(q, {1, 4}), view(&scale, {1, 1}), {}}, kernel));
    expect_ok(run_op<Op>(d, {view(d_y, {1, 4}), view(q, {1, 4}), {}, view(&bias, {1, 1})}, kernel));
    EXPECT_EQ(scale, 7.5f);
    EXPECT_EQ(bias, 2.5f);
    expect_error(run_op<Op>(d, {view(d_y, {1, 4}), view(q, {1, 4}), {}, {}}, kernel),
                 Code::invalid_argument,
                 "qdq_affine_backward: every output is left out, expected at least one");
  }
}

TEST(QdqAffineBackward, ErrorsNameTheFieldAndLeaveTheOutputsAlone) {
  const AffineDesc good{.outer_size = 2, .axis_size = 8, .group_size = 4, .bits = 4};
  std::vector<std::uint8_t> q(16, 3);
  std::vector<float> d_y(16, 1), ds(4, -77), db(4, -78);
  const auto untouched_ds = ds, untouched_db = db;
  const Op::Args args{view(std::as_const(d_y).data(), {2, 8}),
                      view(std::as_const(q).data(), {2, 8}), view(ds.data(), {2, 2}),
                      view(db.data(), {2, 2})};
  const auto with = [&](auto change) {
    AffineDesc d = good;
    change(d);
    return run_op<Op>(d, args);
  };
  const auto operand = [&](auto change) {
    Op::Args a = args;
    change(a);
    return run_op<Op>(good, a);
  };
  using D = AffineDesc&;
  using A = Op::Args&;
  const Code bad = Code::invalid_argument;
  const std::string op = "qdq_affine_backward: ";
  expect_error(with([](D d) { d.outer_size = -2; }), bad,
               op + "outer_size: -2, expected at least 0");
  expect_error(with([](D d) { d.group_size = 0; }), bad, op + "group_size: 0, expected 2..1024");
  expect_error(with([](D d) { d.group_size = 3; }), bad,
               op + "axis_size: 8, expected a multiple of group_size 3");
  expect_error(with([](D d) { d.bits = 9; }), bad, op + "bits: 9, expected 1..8");
  expect_error(with([](D d) { d.n_bins = 1; }), bad, op + "n_bins: 1, expected 2..16");
  expect_error(with([](D d) { d.element = DType::u8; }), Code::unsupported,
               op + "element: u8, expected f32, f64, f16 or bf16");
  expect_error(with([](D d) { d.storage = CodeStorage::packed; }), bad,
               op + "q: dtype u8, expected u32");
  expect_error(with([](D d) { d.group_size = 8; }), bad,
               op + "d_scales: shape [2,2], expected [2,1] = [outer_size,axis_size/group_size]");
  expect_error(operand([](A a) { a.d_y = {}; }), bad, op + "d_y: null, expected f32 [2,8]");
  expect_error(operand([](A a) { a.d_y.dtype = DType::f64; }), bad,
               op + "d_y: dtype f64, expected f32");
  expect_error(operand([](A a) { a.q.stride[0] = 7; }), Code::unsupported,
               op + "q: stride 7 of axis 0, expected at least 8");
  expect_error(operand([](A a) { a.d_biases.stride[0] = 3; }), Code::unsupported,
               op + "d_biases: stride 3 of axis 0, expected 2");
  expect_error(operand([](A a) { a.d_biases.data = a.d_scales.data; }), bad,
               op + "d_biases: overlaps d_scales, expected memory of its own");
  EXPECT_EQ(ds, untouched_ds);
  EXPECT_EQ(db, untouched_db);
  expect_ok(run_op<Op>(good, args));
  EXPECT_EQ(ds, std::vector<float>(4, 12));
  EXPECT_EQ(db, std::vector<float>(4, 4));
}

}  // namespace
}  // namespace bittern
