#include "oracle/op_test.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using oracle::expect_error;
using oracle::expect_ok;
using oracle::kBothKernels;
using oracle::run_op;
using Op = QdqAffineForward;

TEST(QdqAffineForward, MatchesRefEverywhere) { oracle::expect_parity("qdq_affine_forward"); }

// One group of two equal codes.
template <class X, class S = X>
double value(std::uint8_t code, double scale, double bias, AffineRounding rounding,
             std::string_view kernel) {
  const AffineDesc d{.outer_size = 1,
                     .axis_size = 2,
                     .group_size = 2,
                     .bits = 8,
                     .element = dtype_of<X>(),
                     .f32_scale = !std::is_same_v<X, S>,
                     .rounding = rounding};
  const std::uint8_t q[] = {code, code};
  const S s[] = {from_math<S>(static_cast<Math<S>>(scale))};
  const S b[] = {from_math<S>(static_cast<Math<S>>(bias))};
  X y[2];
  expect_ok(
      run_op<Op>(d, {view(q, {1, 2}), view(s, {1, 1}), view(b, {1, 1}), view(y, {1, 2})}, kernel));
  EXPECT_EQ(to_math(y[0]), to_math(y[1]));
  return static_cast<double>(to_math(y[0]));
}

// With p the precision of the dtype, 3 * (1 + 2^(1-p)) is a tie that rounds up to 3 + 2^(3-p): the
// bias -3 uncovers it.
template <class X>
void expect_roundings_differ(int precision) {
  const double s = 1 + std::ldexp(1.0, 1 - precision);
  for (const auto kernel : kBothKernels) {
    EXPECT_EQ(value<X>(3, s, -3, AffineRounding::once, kernel), std::ldexp(3.0, 1 - precision));
    EXPECT_EQ(value<X>(3, s, -3, AffineRounding::mlx, kernel), std::ldexp(4.0, 1 - precision));
  }
}

TEST(QdqAffineForward, OnceRoundsOnceAndMlxTwice) {
  expect_roundings_differ<float>(24);
  expect_roundings_differ<double>(53);
  expect_roundings_differ<f16>(11);
  expect_roundings_differ<bf16>(8);
}

TEST(QdqAffineForward, HalfProductsMayOverflowInMlxRounding) {
  for (const auto kernel : kBothKernels) {
    // 255 * 300 = 76500 is beyond f16; 56500 is not, and rounds to a multiple of 32.
    EXPECT_EQ(value<f16>(255, 300, -20000, AffineRounding::once, kernel), 56512);
    EXPECT_EQ(value<f16>(255, 300, -20000, AffineRounding::mlx, kernel), INFINITY);
  }
}

TEST(QdqAffineForward, HalfOutputsTakeF32Scales) {
  for (const auto kernel : kBothKernels) {
    // 5 * 0.3f - 1.5 = 2^-24 exactly; rounded to bf16 first, the product is 1.5.
    EXPECT_EQ((value<bf16, float>(5, 0.3f, -1.5, AffineRounding::once, kernel)), 0x1p-24);
    EXPECT_EQ((value<bf16, float>(5, 0.3f, -1.5, AffineRounding::mlx, kernel)), 0);
  }
}

TEST(QdqAffineForward, ReadsPackedCodes) {
  for (const auto kernel : kBothKernels) {
    const AffineDesc d{.outer_size = 1,
                       .axis_size = 8,
                       .group_size = 4,
                       .bits = 4,
                       .storage = CodeStorage::packed};
    const std::uint32_t q[] = {0x92E5173Au};
    const float s[] = {0.5f, -2.0f}, b[] = {1.0f, 10.0f};
    std::vector<float> y(8);
    expect_ok(run_op<Op>(
        d, {view(q, {1, 1}), view(s, {1, 2}), view(b, {1, 2}), view(y.data(), {1, 8})}, kernel));
    EXPECT_EQ(y, (std::vector<float>{6, 2.5f, 4.5f, 1.5f, 0, -18, 6, -8}));
  }
}

TEST(QdqAffineForward, SkuAndGuaranteeTellTheTruth) {
  AffineDesc d{.outer_size = 1, .axis_size = 64, .bits = 4};
  auto plan = Plan<Op>::select(d);
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->sku().category, "affine");
  EXPECT_EQ(plan->sku().aux_element, DType::u8);
  EXPECT_EQ(plan->precision_guarantee().math_precision, DType::f32);
  d.element = DType::f64;
  d.storage = CodeStorage::packed;
  plan = Plan<Op>::select(d);
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->sku().element, DType::f64);
  EXPECT_EQ(plan->sku().aux_element, DType::u32);
  EXPECT_EQ(plan->precision_guarantee().math_precision, DType::f64);
}

TEST(QdqAffineForward, ErrorsNameTheFieldAndLeaveTheOutputAlone) {
  const AffineDesc good{.outer_size = 2, .axis_size = 8, .group_size = 4, .bits = 4};
  std::vector<std::uint8_t> q(16, 3);
  std::vector<float> s(4, 1), b(4, 2), y(16, -77);
  const auto untouched = y;
  const Op::Args args{view(std::as_const(q).data(), {2, 8}), view(std::as_const(s).data(), {2, 2}),
                      view(std::as_const(b).data(), {2, 2}), view(y.data(), {2, 8})};
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
  const std::string op = "qdq_affine_forward: ";
  expect_error(with([](D d) { d.outer_size = -2; }), bad,
               op + "outer_size: -2, expected at least 0");
  expect_error(with([](D d) { d.axis_size = -4; }), bad, op + "axis_size: -4, expected at least 0");
  expect_error(with([](D d) { d.group_size = 1; }), bad, op + "group_size: 1, expected 2..1024");
  expect_error(with([](D d) { d.group_size = 1025; }), bad,
               op + "group_size: 1025, expected 2..1024");
  expect_error(with([](D d) { d.group_size = 3; }), bad,
               op + "axis_size: 8, expected a multiple of group_size 3");
  expect_error(with([](D d) { d.bits = 9; }), bad, op + "bits: 9, expected 1..8");
  expect_error(with([](D d) { d.bits = -1; }), bad, op + "bits: -1, expected 1..8");
  expect_error(with([](D d) { d.n_bins = 17; }), bad, op + "n_bins: 17, expected 2..16");
  expect_error(with([](D d) { d.rounding = AffineRounding{2}; }), bad,
               op + "rounding: 2, expected 0..1");
  expect_error(with([](D d) { d.element = DType::s8; }), Code::unsupported,
               op + "element: s8, expected f32, f64, f16 or bf16");
  expect_error(with([](D d) { d.element = DType::f64, d.f32_scale = true; }), Code::unsupported,
               op + "element: f64 with f32_scale");
  expect_error(with([](D d) { d.storage = CodeStorage::packed; }), bad,
               op + "q: dtype u8, expected u32");
  expect_error(with([](D d) { d.element = DType::f16; }), bad,
               op + "scales: dtype f32, expected f16");
  expect_error(with([](D d) { d.group_size = 2; }), bad,
               op + "scales: shape [2,2], expected [2,4] = [outer_size,axis_size/group_size]");
  expect_error(operand([](A a) { a.biases = {}; }), bad, op + "biases: null, expected f32 [2,2]");
  expect_error(operand([](A a) { a.y = {}; }), bad, op + "y: null, expected f32 [2,8]");
  expect_error(operand([](A a) { a.y.stride[1] = 2; }), Code::unsupported,
               op + "y: stride 2 of axis 1, expected 1");
  expect_error(operand([](A a) { a.scales.stride[0] = 3; }), Code::unsupported,
               op + "scales: stride 3 of axis 0, expected 2");
  expect_error(operand([&](A a) { a.biases.data = y.data(); }), bad,
               op + "y: overlaps biases, expected memory of its own");
  EXPECT_EQ(y, untouched);
  expect_ok(run_op<Op>(good, args));
  EXPECT_EQ(y, std::vector<float>(16, 5));
}

}  // namespace
}  // namespace bittern
