#include <gtest/gtest.h>

#include "ops/quantize/quantize_test.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using namespace oracle;
using Op = QuantizePerGroupBackward;

TEST(QuantizePerGroupBackward, MatchesRefEverywhere) {
  expect_parity("quantize_per_group_backward");
}
TEST(QuantizePerGroupBackward, MatchesRefOnEveryHalf) { expect_parity_on_every_half<Op>(12, 2); }
TEST(QuantizePerGroupBackward, RefusesDescriptors) { expect_quantize_desc_errors<Op>(); }
TEST(QuantizePerGroupBackward, EmptyIsOk) { expect_empty_is_ok<Op>(); }
TEST(QuantizePerGroupBackward, RefusesOperands) {
  expect_operand_errors<Op>({.outer_size = 2, .axis_size = 128, .group_size = 64});
  expect_operand_errors<Op>({.outer_size = 3,
                             .axis_size = 5,
                             .inner_size = 4,
                             .granularity = Granularity::channel,
                             .element = DType::f16,
                             .f32_scale = true});
}

std::vector<float> backward(const char* kernel, const std::vector<float>& d_y,
                            const std::vector<float>& x, const float scale,
                            const std::int32_t zero_point, std::int32_t q_min, std::int32_t q_max) {
  const auto n = static_cast<std::int64_t>(x.size());
  const QuantizeDesc d{.outer_size = 1,
                       .axis_size = n,
                       .granularity = Granularity::tensor,
                       .q_min = q_min,
                       .q_max = q_max};
  std::vector<float> d_x(x.size(), -99);
  const Status s = run_op<Op>(d,
                              {view(d_y.data(), {1, n}), view(x.data(), {1, n}), view(&scale, {1}),
                               view(&zero_point, {1}), view(d_x.data(), {1, n})},
                              kernel);
  EXPECT_TRUE(s.ok()) << s.message();
  return d_x;
}

TEST(QuantizePerGroupBackward, BothEndsAreInside) {
  for_each_kernel([](const char* k) {
    // Range -2..2, so R(x) in -2..2: the tie 2.5 goes to 2 (inside), 1.5 is a tie of its own.
    EXPECT_EQ(backward(k, {1, 1, 1, 1, 1, 1}, {2.5f, 2.5000002f, -2.5f, -2.5000002f, 2.0f, 3.0f},
                       1.0f, 0, -2, 2),
              (std::vector<float>{1, 0, 1, 0, 1, 0}));
    // Range -1..1: the tie 1.5 goes to 2 (outside).
    EXPECT_EQ(backward(k, {8, 8, 8, 8}, {1.5f, 1.4999999f, -1.5f, -1.4999999f}, 1.0f, 0, -1, 1),
              (std::vector<float>{0, 8, 0, 8}));
    // A zero point shifts both ends; a negative scale turns them round.
    EXPECT_EQ(backward(k, {6, 6, 6, 6}, {-3.0f, -4.0f, 1.0f, 2.0f}, 1.0f, 3, 0, 4),
              (std::vector<float>{6, 0, 6, 0}));
    EXPECT_EQ(backward(k, {6, 6, 6, 6}, {6.0f, 8.0f, -2.0f, -4.0f}, -2.0f, 3, 0, 4),
              (std::vector<float>{-3, 0, -3, 0}));
  });
}

TEST(QuantizePerGroupBackward, InfinitiesNanAndDegenerateScales) {
  for_each_kernel([](const char* k) {
    // NaN counts as quotient 0, which zp = 0 puts inside and zp = 9 outside.
    EXPECT_EQ(backward(k, {4, 4, 4}, {kNaN, kInf, -kInf}, 2.0f, 0, -8, 7),
              (std::vector<float>{2, 0, 0}));
    EXPECT_EQ(backward(k, {4, 4, 4}, {kNaN, -4.0f, 0.0f}, 2.0f, 9, -8, 7),
              (std::vector<float>{0, 2, 0}));
    EXPECT_EQ(backward(k, {4, kInf, kNaN}, {0, 0, 0}, 0.0f, 0, -8, 7),
              (std::vector<float>{0, 0, 0}));
    for (const float v : backward(k, {4, 0, kInf}, {1, kInf, kNaN}, kNaN, 0, -8, 7))
      EXPECT_TRUE(std::isnan(v));
    EXPECT_EQ(backward(k, {4, 4}, {1, 1}, kNaN, 8, -8, 7), (std::vector<float>{0, 0}));
    EXPECT_EQ(backward(k, {4, 4}, {kInf, 1}, kInf, 0, -8, 7), (std::vector<float>{0, 0}));
    // A subnormal scale: x / s overflows for all but the smallest x.
    EXPECT_EQ(
        backward(k, {0x1p-149f, 0x1p-149f, 0}, {0x7p-149f, 0x8p-149f, 0}, 0x1p-149f, 0, -8, 7),
        (std::vector<float>{1, 0, 0}));
    // A zero point f32 cannot hold.
    EXPECT_EQ(backward(k, {1, 1, 1}, {-0x1p31f, -0x1p31f + 128, 0}, 1.0f, kIntMax, -1, 7),
              (std::vector<float>{1, 0, 0}));
  });
}

// The header's formula, written out in long double but for the two divisions, which are f32.
TEST(QuantizePerGroupBackward, IsTheStatedFormula) {
  const QuantizeDesc d{
      .outer_size = 7, .axis_size = 480, .group_size = 48, .q_min = -8, .q_max = 7};
  for_each_kernel([&](const char* k) {
    Problem<Op> p = make_problem<Op>(d, 3, {});
    ASSERT_TRUE(run_op<Op>(d, p.args, k).ok());
    int inside = 0, outside = 0;
    for (std::int64_t i = 0; i < 7 * 480; ++i) {
      const float x = p.args.x.as<float>()[i], d_y = p.args.d_y.as<float>()[i];
      const float s = p.args.scale.as<float>()[i / 48];
      const std::int32_t zp = p.args.zero_point.as<std::int32_t>()[i / 48];
      const float z = x / s;
      const long double whole = std::floor(static_cast<long double>(z));
      const long double rest = static_cast<long double>(z) - whole;
      const bool up = rest > 0.5L || (rest == 0.5L && std::fmod(whole, 2.0L) != 0);
      long double code = whole + (up ? 1 : 0);
      if (std::isinf(z)) code = z;
      if (std::isnan(z) || s == 0) code = 0;
      code += zp;
      const bool passes = s != 0 && code >= d.q_min && code <= d.q_max;
      const float want = passes ? d_y / s : 0.0f, got = p.args.d_x.as<float>()[i];
      if (std::isnan(want)) {
        EXPECT_TRUE(std::isnan(got)) << i;
      } else {
        EXPECT_EQ(std::bit_cast<std::uint32_t>(got), std::bit_cast<std::uint32_t>(want)) << i;
      }
      ++(passes ? inside : outside);
    }
    EXPECT_GT(inside, 500);
    EXPECT_GT(outside, 500);
  });
}

// Where the forward clamps, the gradient is 0, and nowhere else: compared through the forward op.
TEST(QuantizePerGroupBackward, PassesExactlyWhereTheForwardDoesNotClamp) {
  const QuantizeDesc d{
      .outer_size = 4, .axis_size = 1000, .group_size = 40, .q_min = -7, .q_max = 6};
  QuantizeDesc wide = d;
  wide.q_min = -128;
  wide.q_max = 127;
  for_each_kernel([&](const char* k) {
    std::vector<float> x(4000), scale(100), d_y(4000, 1.0f), d_x(4000);
    std::vector<std::int8_t> q(4000);
    Rng rng(11);
    for (float& s : scale)
      s = static_cast<float>(rng.chance(3) ? -rng.uniform() : rng.uniform()) + 1.5f;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double tie = static_cast<double>(rng.below(24) - 12) + 0.5;
      x[i] = static_cast<float>(
          step(DType::f32, tie * scale[i / 40], static_cast<int>(rng.below(5)) - 2));
    }
    const Shape shape = d.tensor_shape(), params = d.param_shape();
    const auto in = [](const std::vector<float>& v, const Shape& s) { return view(v.data(), s); };
    ASSERT_TRUE(run_op<QuantizePerGroup>(
                    wide, {in(x, shape), in(scale, params), {}, view(q.data(), shape)}, k)
                    .ok());
    ASSERT_TRUE(
        run_op<Op>(
            d, {in(d_y, shape), in(x, shape), in(scale, params), {}, view(d_x.data(), shape)}, k)
            .ok());
    for (std::size_t i = 0; i < x.size(); ++i)
      EXPECT_EQ(d_x[i], q[i] >= -7 && q[i] <= 6 ? 1.0f / scale[i / 40] : 0.0f) << x[i];
  });
}

TEST(QuantizePerGroupBackward, InPlace) {
  for_each_kernel([](const char* k) {
    const QuantizeDesc d{.outer_size = 1,
                         .axis_size = 3,
                         .granularity = Granularity::token,
                         .q_min = -2,
                         .q_max = 2};
    const float scale = 2.0f;
    for (const bool over_x : {false, true}) {
      std::vector<float> d_y = {8, 8, 8}, x = {1, 100, -4};
      float* out = over_x ? x.data() : d_y.data();
      ASSERT_TRUE(run_op<Op>(d,
                             {as_const(view(d_y.data(), {1, 3})),
                              as_const(view(x.data(), {1, 3})),
                              view(&scale, {1}),
                              {},
                              view(out, {1, 3})},
                             k)
                      .ok());
      EXPECT_EQ(std::vector<float>(out, out + 3), (std::vector<float>{4, 0, 4}));
    }
  });
}

}  // namespace
}  // namespace bittern
