#include <gtest/gtest.h>

#include "ops/quantize/quantize_test.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using namespace oracle;
using Op = FakeQuantizePerGroupBackward;

TEST(FakeQuantizePerGroupBackward, MatchesRefEverywhere) {
  expect_parity("fake_quantize_per_group_backward");
}
TEST(FakeQuantizePerGroupBackward, RefusesDescriptors) { expect_quantize_desc_errors<Op>(); }
TEST(FakeQuantizePerGroupBackward, RefusesOperands) {
  expect_operand_errors<Op>({.outer_size = 2, .axis_size = 128, .group_size = 64});
}

TEST(FakeQuantizePerGroupBackward, RefusesToComputeNothing) {
  const QuantizeDesc d{.outer_size = 1, .axis_size = 4, .group_size = 4};
  Problem<Op> p = make_problem<Op>(d, 1, {});
  p.args.d_x = p.args.d_scale = p.args.d_zero_point = {};
  expect_error(run_op<Op>(d, p.args), Code::invalid_argument,
               "fake_quantize_per_group_backward: every output is left out, expected at least one");
}

// One parameter over everything.
template <class F>
struct Gradients {
  std::vector<F> d_x;
  F d_scale = 0, d_zero_point = 0;
};
template <class F>
Gradients<F> backward(const char* kernel, std::vector<F> d_y, std::vector<F> x, F scale,
                      std::int32_t zero_point, std::int32_t q_min, std::int32_t q_max) {
  const auto n = static_cast<std::int64_t>(x.size());
  const QuantizeDesc d{.outer_size = 1,
                       .axis_size = n,
                       .granularity = Granularity::tensor,
                       .q_min = q_min,
                       .q_max = q_max,
                       .element = dtype_of<F>()};
  Gradients<F> g{std::vector<F>(x.size())};
  const std::vector<F>&cdy = d_y, &cx = x;
  const F& s = scale;
  const std::int32_t& zp = zero_point;
  const Status status =
      run_op<Op>(d,
                 {view(cdy.data(), {1, n}), view(cx.data(), {1, n}), view(&s, {1}), view(&zp, {1}),
                  view(g.d_x.data(), {1, n}), view(&g.d_scale, {1}), view(&g.d_zero_point, {1})},
                 kernel);
  EXPECT_TRUE(status.ok()) << status.message();
  return g;
}

TEST(FakeQuantizePerGroupBackward, ByHand) {
  for_each_kernel([](const char* kernel) {
    // Codes 0..3 with zero point 1, so R(z) in -1..2; s = 0.5.
    const auto g =
        backward<float>(kernel, {1, 2, 4, 8, 16}, {0.375f, 1.5f, -1, -0.75f, 1.25f}, 0.5f, 1, 0, 3);
    // z = 0.75, 3 (above), -2 (below), -1.5 (R = -2, below), 2.5 (R = 2, inside)
    EXPECT_EQ(g.d_x, (std::vector<float>{1, 0, 0, 0, 16}));
    // 1 * 0.25 + 2 * 2 + 4 * -1 + 8 * -1 + 16 * -0.5
    EXPECT_EQ(g.d_scale, -15.75f);
    // -(0.5 * (2 + 4 + 8))
    EXPECT_EQ(g.d_zero_point, -7);
  });
}

TEST(FakeQuantizePerGroupBackward, TheRangeIsInclusive) {
  for_each_kernel([](const char* kernel) {
    EXPECT_EQ(backward<float>(kernel, {1, 1, 1, 1}, {-8, 7, -9, 8}, 1, 0, -8, 7).d_x,
              (std::vector<float>{1, 1, 0, 0}));
    // 7.5 rounds to 8, -8.5 to -8.
    EXPECT_EQ(backward<float>(kernel, {1, 1}, {7.5f, -8.5f}, 1, 0, -8, 7).d_x,
              (std::vector<float>{0, 1}));
  });
}

TEST(FakeQuantizePerGroupBackward, AwkwardValues) {
  for_each_kernel([](const char* kernel) {
    // NaN counts as 0; infinities are out of range on either side.
    const auto g = backward<float>(kernel, {1, 2, 4}, {kNaN, kInf, -kInf}, 1, 0, -8, 7);
    EXPECT_EQ(g.d_x, (std::vector<float>{1, 0, 0}));
    EXPECT_EQ(g.d_scale, 2 * 7 - 4 * 8);
    EXPECT_EQ(g.d_zero_point, -6);
    // A scale of 0 or NaN makes every quotient 0 ...
    EXPECT_EQ(backward<float>(kernel, {1, 2}, {3, -4}, 0, 0, -8, 7).d_x,
              (std::vector<float>{1, 2}));
    EXPECT_EQ(backward<float>(kernel, {1, 2}, {3, -4}, kNaN, 0, -8, 7).d_scale, 0);
    // ... which a zero point can put out of range.
    const auto out = backward<float>(kernel, {1, 2}, {3, -4}, 0, 9, -8, 7);
    EXPECT_EQ(out.d_x, (std::vector<float>{0, 0}));
    EXPECT_EQ(out.d_scale, 3 * (7 - 9));
    EXPECT_TRUE(std::signbit(out.d_zero_point));  // -(0 * 1) + -(0 * 2)
  });
}

TEST(FakeQuantizePerGroupBackward, FarZeroPoints) {
  for_each_kernel([](const char* kernel) {
    // R(z) + zp is 2^31 - 2, the last code, and 2^31 - 1, beyond it: f32 has both as 2^31.
    const auto g = backward<float>(kernel, {3, 5}, {-1, 0}, 1, kIntMax, 0, kIntMax - 1);
    EXPECT_EQ(g.d_x, (std::vector<float>{3, 0}));
    EXPECT_EQ(g.d_scale, -5);  // q - zp = -1
    EXPECT_EQ(g.d_zero_point, -5);
    // q - zp = 1 - 2^31 takes 31 bits, and the product 55.
    const auto far = backward<float>(kernel, {1.0000001f}, {0}, 1, kIntMax, -128, 0);
    EXPECT_EQ(far.d_scale,
              static_cast<float>(static_cast<long double>(1.0000001f) * -2147483647.0L));
  });
}

// Against the stated formula and the autograd of the surrogate, over every granularity.
//
//   y = x + detach(f(x) - x) in range, detach(f(x)) out of it:              d_y/d_x = in range
//   y = s * (z + detach(R(z) - z)) in range with x = s * z held still:      d_y/ds = R(z) - z
//   y = s * (q - zp) out of range, with q = q_min or q_max:     d_y/ds = q - zp, d_y/dzp = -s
TEST(FakeQuantizePerGroupBackward, IsTheSurrogatesDerivative) {
  const QuantizeDesc geometries[] = {
      {.outer_size = 3, .axis_size = 80, .group_size = 40},
      {.outer_size = 4, .axis_size = 50, .granularity = Granularity::token},
      {.outer_size = 5, .axis_size = 7, .inner_size = 3, .granularity = Granularity::channel},
      {.outer_size = 9, .axis_size = 33, .granularity = Granularity::channel},
      {.outer_size = 6, .axis_size = 31, .granularity = Granularity::tensor}};
  for (QuantizeDesc d : geometries) {
    d.element = DType::f64;
    d.q_min = -8;
    d.q_max = 7;
    const GroupGeometry g = d.geometry();
    const auto n = static_cast<std::size_t>(d.tensor_shape().numel());
    const auto params = static_cast<std::size_t>(g.params);
    Rng rng(3);
    std::vector<double> d_y(n), x(n), scale(params), d_x(n), d_scale(params), d_zero_point(params);
    std::vector<std::int32_t> zero_point(params);
    for (std::size_t i = 0; i < n; ++i) {
      d_y[i] = rng.normal();
      x[i] = 3 * rng.normal();
    }
    for (std::size_t p = 0; p < params; ++p) {
      scale[p] = 0.2 + rng.uniform();
      zero_point[p] = static_cast<std::int32_t>(rng.below(5) - 2);
    }
    const auto in = [](const auto& v, const Shape& shape) { return view(v.data(), shape); };
    const Status s = run_op<Op>(
        d, {in(std::as_const(d_y), d.tensor_shape()), in(std::as_const(x), d.tensor_shape()),
            in(std::as_const(scale), d.param_shape()),
            in(std::as_const(zero_point), d.param_shape()), view(d_x.data(), d.tensor_shape()),
            view(d_scale.data(), d.param_shape()), view(d_zero_point.data(), d.param_shape())});
    ASSERT_TRUE(s.ok()) << s.message();

    // The surrogate's value with R's error (or the code) detached at the point of interest.
    const auto loss = [&](const std::vector<double>& at_x, const std::vector<double>& at_scale,
                          const std::vector<double>& at_zero) {
      double sum = 0;
      for (std::size_t i = 0; i < n; ++i) {
        const auto at = static_cast<std::int64_t>(i);
        const auto p = static_cast<std::size_t>(g.param(at / g.row_length, at % g.row_length));
        const double z = x[i] / scale[p], code = std::nearbyint(z) + zero_point[p];
        const double y = code >= d.q_min && code <= d.q_max
                             ? at_scale[p] * (at_x[i] / at_scale[p] + (std::nearbyint(z) - z))
                             : at_scale[p] * ((code < d.q_min ? d.q_min : d.q_max) - at_zero[p]);
        sum += d_y[i] * y;
      }
      return sum;
    };
    const std::vector<double> zero(zero_point.begin(), zero_point.end());
    constexpr double kStep = 1e-4;
    const auto slope = [&](std::vector<double> which, std::size_t i, auto&& at) {
      const double centre = which[i];
      which[i] = centre + kStep;
      const double up = at(which);
      which[i] = centre - kStep;
      return (up - at(which)) / 2 / kStep;
    };
    for (std::size_t i = 0; i < n; ++i)
      EXPECT_NEAR(d_x[i], slope(x, i, [&](auto& v) { return loss(v, scale, zero); }), 1e-6);
    for (std::size_t p = 0; p < params; ++p) {
      EXPECT_NEAR(d_scale[p], slope(scale, p, [&](auto& v) { return loss(x, v, zero); }), 1e-6);
      EXPECT_NEAR(d_zero_point[p], slope(zero, p, [&](auto& v) { return loss(x, scale, v); }),
                  1e-6);
    }
  }
}

TEST(FakeQuantizePerGroupBackward, SumsOfAwkwardLengths) {
  for (const std::int64_t n : {1, 3, 5, 48, 1000, 4099}) {
    Rng rng(static_cast<std::uint64_t>(n));
    std::vector<float> d_y, x, scale_terms, zero_point_terms;
    for (std::int64_t i = 0; i < n; ++i) {
      d_y.push_back(static_cast<float>(rng.normal()));
      x.push_back(static_cast<float>(4 * rng.normal()));
      const float z = x.back() / 0.3f, r = std::nearbyint(z);
      const bool inside = r >= -8 && r <= 7;
      scale_terms.push_back(d_y.back() * (inside ? r - z : r < 0 ? -8.0f : 7.0f));
      zero_point_terms.push_back(inside ? 0.0f : -(0.3f * d_y.back()));
    }
    const float d_scale = halving_sum(scale_terms), d_zero_point = halving_sum(zero_point_terms);
    for_each_kernel([&](const char* kernel) {
      const auto g = backward<float>(kernel, d_y, x, 0.3f, 0, -8, 7);
      EXPECT_EQ(g.d_scale, d_scale) << n;
      EXPECT_EQ(g.d_zero_point, d_zero_point) << n;
    });
  }
}

}  // namespace
}  // namespace bittern
