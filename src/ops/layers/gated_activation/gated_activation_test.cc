#include "core/numerics.h"
#include "oracle/op_test.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using oracle::expect_error;
using oracle::expect_ok;
using oracle::kBothKernels;
using oracle::run_op;
using Op = GatedActivation;

TEST(GatedActivation, MatchesRefEverywhere) { oracle::expect_parity("gated_activation"); }

double exact(GatedKind kind, double x) {
  switch (kind) {
    case GatedKind::swiglu: return x / (1 + std::exp(-x));
    case GatedKind::geglu_tanh:
      return 0.5 * x * (1 + std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
    default: return 0.5 * x * std::erfc(-x * 0.7071067811865476);
  }
}

// gate and up are the halves of one matrix.
TEST(GatedActivation, IsTheFormulaOnHalvesOfOneMatrix) {
  for (const GatedKind kind : {GatedKind::swiglu, GatedKind::geglu_tanh, GatedKind::geglu_erf}) {
    const GatedActivationDesc d{.rows = 3, .dim = 21, .kind = kind};
    oracle::Rng rng(5);
    std::vector<float> both;
    for (int i = 0; i < 3 * 42; ++i) both.push_back(static_cast<float>(2 * rng.normal()));
    const float* in = both.data();
    for (const auto kernel : kBothKernels) {
      std::vector<float> y(63, NAN);
      expect_ok(run_op<Op>(
          d, {view(in, d.shape(), 42), view(in + 21, d.shape(), 42), view(y.data(), d.shape())},
          kernel));
      for (std::size_t i = 0; i < 3; ++i) {
        for (std::size_t j = 0; j < 21; ++j) {
          const double want = exact(kind, static_cast<double>(both[i * 42 + j])) *
                              static_cast<double>(both[i * 42 + 21 + j]);
          EXPECT_NEAR(y[i * 21 + j], want, 1e-6 * std::max(1.0, std::abs(want)));
        }
      }
    }
  }
}

// gelu(1) = 0.841344746..., gelu_tanh(1) = 0.841191990..., silu(1) = 0.731058578...
TEST(GatedActivation, KnowsItsKinds) {
  const float one = 1, two = 2;
  for (const auto kernel : kBothKernels) {
    const float want[] = {1.4621172f, 1.682384f, 1.6826895f};
    for (const int kind : {0, 1, 2}) {
      float y = 0;
      expect_ok(run_op<Op>({.rows = 1, .dim = 1, .kind = static_cast<GatedKind>(kind)},
                           {view(&one, {1, 1}), view(&two, {1, 1}), view(&y, {1, 1})}, kernel));
      EXPECT_FLOAT_EQ(y, want[kind]);
    }
  }
}

// silu(1) = 0.73105..., in bf16 0.73046875; times 1.0078125 that is 0.736..., stored 0.734375.
TEST(GatedActivation, RoundsOnceOrEachTime) {
  const bf16 gate = to_bf16(1), up = to_bf16(1.0078125f);
  for (const auto kernel : kBothKernels) {
    for (const NormRounding rounding : {NormRounding::once, NormRounding::each}) {
      bf16 y;
      expect_ok(run_op<Op>({.rows = 1, .dim = 1, .element = DType::bf16, .rounding = rounding},
                           {view(&gate, {1, 1}), view(&up, {1, 1}), view(&y, {1, 1})}, kernel));
      const float g = rounding == NormRounding::each ? 0.73046875f : 0.7310586f;
      EXPECT_EQ(y.bits, to_bf16(g * 1.0078125f).bits);
    }
  }
}

TEST(GatedActivation, HandlesTheInfinities) {
  const float inf = std::numeric_limits<float>::infinity();
  const float gate[] = {inf, -inf, NAN, -1e30f, 0.0f, -0.0f}, up[] = {1, 1, 1, 1, 1, 1};
  for (const auto kernel : kBothKernels) {
    for (const int kind : {0, 1, 2}) {
      float y[6];
      expect_ok(run_op<Op>({.rows = 1, .dim = 6, .kind = static_cast<GatedKind>(kind)},
                           {view(gate, {1, 6}), view(up, {1, 6}), view(y, {1, 6})}, kernel));
      EXPECT_EQ(y[0], inf);
      EXPECT_TRUE(std::isnan(y[1]));
      EXPECT_TRUE(std::isnan(y[2]));
      EXPECT_EQ(y[3], 0.0f);
      EXPECT_EQ(y[4], 0.0f);
      EXPECT_FALSE(std::signbit(y[4]));
      EXPECT_TRUE(std::signbit(y[5]));
    }
  }
}

TEST(GatedActivation, ErrorsNameWhatIsWrong) {
  const Code bad = Code::invalid_argument;
  const std::string op = "gated_activation: ";
  expect_error(Op::check({.rows = -1}), bad, op + "rows: -1, expected at least 0");
  expect_error(Op::check({.dim = 0}), bad, op + "dim: 0, expected 1..1048576");
  expect_error(Op::check({.kind = static_cast<GatedKind>(3)}), bad, op + "kind: 3, expected 0..2");
  expect_error(Op::check({.element = DType::f64}), Code::unsupported,
               op + "element: f64, expected f32, f16 or bf16");
  expect_error(Op::check({.rounding = static_cast<NormRounding>(-1)}), bad,
               op + "rounding: -1, expected 0..1");
  const float x[2] = {};
  float y[2] = {};
  expect_error(
      run_op<Op>({.rows = 1, .dim = 2}, {view(x, {1, 2}), view(x, {2, 1}), view(y, {1, 2})}), bad,
      op + "up: shape [2,1], expected [1,2] = [rows,dim]");
}

}  // namespace
}  // namespace bittern
