#include "core/numerics.h"
#include "oracle/op_test.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using oracle::expect_error;
using oracle::expect_ok;
using oracle::kBothKernels;
using oracle::run_op;
using Op = GatedActivationBackward;

constexpr GatedKind kKinds[] = {GatedKind::swiglu, GatedKind::geglu_tanh, GatedKind::geglu_erf};

TEST(GatedActivationBackward, MatchesRefEverywhere) {
  oracle::expect_parity("gated_activation_backward");
}

double exact(GatedKind kind, double x) {
  switch (kind) {
    case GatedKind::swiglu: return x / (1 + std::exp(-x));
    case GatedKind::geglu_tanh:
      return 0.5 * x * (1 + std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
    default: return 0.5 * x * std::erfc(-x * 0.7071067811865476);
  }
}

// gate and up are the halves of one matrix, and their gradients take its place.
TEST(GatedActivationBackward, IsTheDerivativeOfTheForward) {
  for (const GatedKind kind : kKinds) {
    const GatedActivationDesc d{.rows = 3, .dim = 21, .kind = kind};
    oracle::Rng rng(5);
    std::vector<float> both, d_y;
    for (int i = 0; i < 3 * 42; ++i) both.push_back(static_cast<float>(3 * rng.normal()));
    for (int i = 0; i < 3 * 21; ++i) d_y.push_back(static_cast<float>(rng.normal()));
    for (const auto kernel : kBothKernels) {
      std::vector<float> matrix = both;
      const float* in = matrix.data();
      expect_ok(run_op<Op>(d,
                           {view(std::as_const(d_y).data(), d.shape()), view(in, d.shape(), 42),
                            view(in + 21, d.shape(), 42), view(matrix.data(), d.shape(), 42),
                            view(matrix.data() + 21, d.shape(), 42)},
                           kernel));
      for (std::size_t i = 0; i < 3; ++i) {
        for (std::size_t j = 0; j < 21; ++j) {
          const auto gate = static_cast<double>(both[i * 42 + j]);
          const auto up = static_cast<double>(both[i * 42 + 21 + j]);
          const auto g = static_cast<double>(d_y[i * 21 + j]);
          constexpr double kStep = 1e-5;
          const double slope =
              (exact(kind, gate + kStep) - exact(kind, gate - kStep)) / (2 * kStep);
          const double size = std::max(1.0, std::abs(g * up));
          EXPECT_NEAR(matrix[i * 42 + j], g * up * slope, 3e-6 * size);
          EXPECT_NEAR(matrix[i * 42 + 21 + j], g * exact(kind, gate),
                      1e-6 * std::max(1.0, std::abs(g * gate)));
        }
      }
    }
  }
}

// f and f' at 1: silu 0.731058578 and 0.927670512; gelu_tanh 0.841191990 and 1.082963976;
// gelu 0.841344746 and 1.083315471. d_y = 2 and up = 3.
TEST(GatedActivationBackward, KnowsItsKinds) {
  const float one = 1, two = 2, three = 3;
  const double value[] = {0.7310585786, 0.8411919906, 0.8413447461};
  const double slope[] = {0.9276705119, 1.0829640838, 1.0833154706};
  for (const auto kernel : kBothKernels) {
    for (const int kind : {0, 1, 2}) {
      float d_gate = 0, d_up = 0;
      expect_ok(run_op<Op>({.rows = 1, .dim = 1, .kind = static_cast<GatedKind>(kind)},
                           {view(&two, {1, 1}), view(&one, {1, 1}), view(&three, {1, 1}),
                            view(&d_gate, {1, 1}), view(&d_up, {1, 1})},
                           kernel));
      EXPECT_NEAR(d_gate, 6 * slope[kind], 3e-6);
      EXPECT_NEAR(d_up, 2 * value[kind], 4e-7);
    }
  }
}

// Only what is asked for, and the results in the memory of d_y.
TEST(GatedActivationBackward, EitherGradientMayBeLeftOut) {
  const float gate[] = {1, -2, 0.5f}, up[] = {2, 3, -4}, d_y[] = {1, 0.5f, 2};
  const GatedActivationDesc d{.rows = 1, .dim = 3};
  for (const auto kernel : kBothKernels) {
    float d_gate[3], d_up[3];
    const Op::Args all{view(d_y, {1, 3}), view(gate, {1, 3}), view(up, {1, 3}),
                       view(d_gate, {1, 3}), view(d_up, {1, 3})};
    expect_ok(run_op<Op>(d, all, kernel));
    for (const bool first : {false, true}) {
      float place[] = {d_y[0], d_y[1], d_y[2]};
      Op::Args one = all;
      one.d_y = view(std::as_const(place), {1, 3});
      one.d_gate = first ? view(place, {1, 3}) : MutView{};
      one.d_up = first ? MutView{} : view(place, {1, 3});
      expect_ok(run_op<Op>(d, one, kernel));
      for (const int j : {0, 1, 2}) EXPECT_EQ(place[j], (first ? d_gate : d_up)[j]);
    }
  }
}

// Large gates: the slopes are 1 and 0, not the NaN of infinity * 0.
TEST(GatedActivationBackward, HandlesLargeGates) {
  const float inf = std::numeric_limits<float>::infinity();
  const float gate[] = {1e30f, -1e30f, 3e38f, -3e38f, inf, -inf, NAN, 20},
              ones[8] = {1, 1, 1, 1, 1, 1, 1, 1};
  for (const auto kernel : kBothKernels) {
    for (const GatedKind kind : kKinds) {
      float d_gate[8], d_up[8];
      expect_ok(run_op<Op>({.rows = 1, .dim = 8, .kind = kind},
                           {view(ones, {1, 8}), view(gate, {1, 8}), view(ones, {1, 8}),
                            view(d_gate, {1, 8}), view(d_up, {1, 8})},
                           kernel));
      for (const int j : {0, 2}) {
        EXPECT_EQ(d_gate[j], 1);
        EXPECT_EQ(d_gate[j + 1], 0);
        EXPECT_EQ(d_up[j], gate[j]);
        EXPECT_EQ(d_up[j + 1], 0);
      }
      if (kind == GatedKind::swiglu) {
        EXPECT_TRUE(std::isnan(d_gate[4]));
        EXPECT_TRUE(std::isnan(d_gate[5]));
      } else {
        EXPECT_EQ(d_gate[4], 1);
        EXPECT_EQ(d_gate[5], 0);
      }
      EXPECT_EQ(d_up[4], inf);
      EXPECT_TRUE(std::isnan(d_up[5]));
      EXPECT_TRUE(std::isnan(d_gate[6]));
      EXPECT_TRUE(std::isnan(d_up[6]));
      EXPECT_NEAR(d_gate[7], 1, 1e-6);  // its neighbour's NaN stays where it is
    }
  }
}

TEST(GatedActivationBackward, ErrorsNameWhatIsWrong) {
  const Code bad = Code::invalid_argument;
  const std::string op = "gated_activation_backward: ";
  expect_error(Op::check({.rows = -1}), bad, op + "rows: -1, expected at least 0");
  expect_error(Op::check({.dim = 0}), bad, op + "dim: 0, expected 1..1048576");
  expect_error(Op::check({.kind = static_cast<GatedKind>(3)}), bad, op + "kind: 3, expected 0..2");
  expect_error(Op::check({.element = DType::f64}), Code::unsupported,
               op + "element: f64, expected f32, f16 or bf16");
  const float x[2] = {};
  float y[3] = {};
  const GatedActivationDesc d{.rows = 1, .dim = 2};
  Op::Args a{view(x, {1, 2}), view(x, {1, 2}), view(x, {1, 2}), {}, {}};
  expect_error(run_op<Op>(d, a), bad, op + "every output is left out, expected at least one");
  a.d_gate = a.d_up = view(y, {1, 2});
  expect_error(run_op<Op>(d, a), bad, op + "d_up: overlaps d_gate, expected memory of its own");
  a.d_up = {};
  a.gate = view(std::as_const(y) + 1, {1, 2});
  expect_error(run_op<Op>(d, a), bad, op + "d_gate: overlaps gate, expected memory of its own");
  a.gate = view(x, {2, 1});
  expect_error(run_op<Op>(d, a), bad, op + "gate: shape [2,1], expected [1,2] = [rows,dim]");
}

}  // namespace
}  // namespace bittern
