#include <gtest/gtest.h>

#include "ops/quantize/quantize_test.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using namespace oracle;
using Op = DequantizePerGroupBackward;

TEST(DequantizePerGroupBackward, MatchesRefEverywhere) {
  expect_parity("dequantize_per_group_backward");
}
TEST(DequantizePerGroupBackward, RefusesDescriptors) { expect_quantize_desc_errors<Op>(); }
TEST(DequantizePerGroupBackward, RefusesOperands) {
  expect_operand_errors<Op>({.outer_size = 2, .axis_size = 128, .group_size = 64});
}

TEST(DequantizePerGroupBackward, RefusesToComputeNothing) {
  const QuantizeDesc d{.outer_size = 1, .axis_size = 4, .group_size = 4};
  Problem<Op> p = make_problem<Op>(d, 1, {});
  p.args.d_q = p.args.d_scale = {};
  expect_error(run_op<Op>(d, p.args), Code::invalid_argument,
               "dequantize_per_group_backward: every output is left out, expected at least one");
}

TEST(DequantizePerGroupBackward, ByHand) {
  for_each_kernel([](const char* kernel) {
    const QuantizeDesc d{.outer_size = 1, .axis_size = 6, .group_size = 3};
    const float d_y[] = {1, 2, 3, -1, 0.5f, 4}, scale[] = {0.5f, 2};
    const std::int8_t q[] = {1, -2, 3, 10, 20, -128};
    const std::int32_t zero_point[] = {1, -3};
    float d_q[6], d_scale[2];
    const Status s =
        run_op<Op>(d,
                   {view(d_y, {1, 6}), view(q, {1, 6}), view(scale, {1, 2}),
                    view(zero_point, {1, 2}), view(d_q, {1, 6}), view(d_scale, {1, 2})},
                   kernel);
    ASSERT_TRUE(s.ok()) << s.message();
    EXPECT_EQ((std::vector<float>(d_q, d_q + 6)), (std::vector<float>{0.5f, 1, 1.5f, -2, 1, 8}));
    // 1*0 + 2*-3 + 3*2, and -1*13 + 0.5*23 + 4*-125
    EXPECT_EQ((std::vector<float>(d_scale, d_scale + 2)), (std::vector<float>{0, -501.5f}));
  });
}

TEST(DequantizePerGroupBackward, ManyRowsOfNothingTakeNoTime) {
  for_each_kernel([](const char* kernel) {
    const QuantizeDesc d{
        .outer_size = std::int64_t{1} << 50, .axis_size = 0, .granularity = Granularity::tensor};
    const float scale = 1;
    float d_scale = 42;
    const ConstView d_y = view(static_cast<const float*>(nullptr), d.tensor_shape());
    const ConstView q = view(static_cast<const std::int8_t*>(nullptr), d.tensor_shape());
    const Status s =
        run_op<Op>(d, {d_y, q, view(&scale, {1}), {}, {}, view(&d_scale, {1})}, kernel);
    EXPECT_TRUE(s.ok()) << s.message();
    EXPECT_EQ(d_scale, 0);
  });
}

// One parameter over `d_y`, with codes of 1.
float sum_of(const char* kernel, std::vector<float> d_y) {
  const auto n = static_cast<std::int64_t>(d_y.size());
  const QuantizeDesc d{.outer_size = 1, .axis_size = n, .granularity = Granularity::tensor};
  const std::vector<std::int8_t> q(d_y.size(), 1);
  const float scale = 1;
  float sum = 42;
  const Status s = run_op<Op>(d,
                              {view(static_cast<const float*>(d_y.data()), {1, n}),
                               view(static_cast<const std::int8_t*>(q.data()), {1, n}),
                               view(&scale, {1}),
                               {},
                               {},
                               view(&sum, {1})},
                              kernel);
  EXPECT_TRUE(s.ok()) << s.message();
  return sum;
}

TEST(DequantizePerGroupBackward, SumsByTheHalvingTree) {
  for_each_kernel([](const char* kernel) {
    // (1 + 1e8) + (-1e8 + 1): the tree pairs 0 with 2 and 1 with 3. In order it would be 1.
    EXPECT_EQ(sum_of(kernel, {1, -1e8f, 1e8f, 1}), 0);
    EXPECT_EQ(sum_of(kernel, {1, 1e8f, 1, -1e8f}), 2);
    // Three terms: the fourth is +0, added to the second.
    EXPECT_EQ(sum_of(kernel, {1e8f, 1, -1e8f}), 1);
    EXPECT_EQ(sum_of(kernel, {1e8f, -1e8f, 1}), 0);
  });
}

TEST(DequantizePerGroupBackward, SignedZerosInfinitiesAndNaN) {
  for_each_kernel([](const char* kernel) {
    EXPECT_TRUE(std::signbit(sum_of(kernel, {-0.0f})));
    EXPECT_TRUE(std::signbit(sum_of(kernel, std::vector<float>(64, -0.0f))));
    // Padding is +0, and -0 + 0 = +0.
    EXPECT_FALSE(std::signbit(sum_of(kernel, std::vector<float>(3, -0.0f))));
    EXPECT_FALSE(std::signbit(sum_of(kernel, std::vector<float>(4099, -0.0f))));
    EXPECT_EQ(sum_of(kernel, {1, kInf, 2}), kInf);
    EXPECT_TRUE(std::isnan(sum_of(kernel, {1, kInf, -kInf})));
    EXPECT_TRUE(std::isnan(sum_of(kernel, {1, 2, kNaN, 3, 4})));
  });
}

TEST(DequantizePerGroupBackward, FarZeroPointsRoundOnce) {
  for_each_kernel([](const char* kernel) {
    const QuantizeDesc d{.outer_size = 1, .axis_size = 1, .group_size = 1};
    const std::int8_t q = 127;
    const float d_y = 1.0000001f, scale = 1;
    const std::int32_t zero_point = kIntMin;
    float sum = 0;
    ASSERT_TRUE(run_op<Op>(d,
                           {view(&d_y, {1, 1}),
                            view(&q, {1, 1}),
                            view(&scale, {1, 1}),
                            view(&zero_point, {1, 1}),
                            {},
                            view(&sum, {1, 1})},
                           kernel)
                    .ok());
    // 57 significant bits: long double holds the product.
    EXPECT_EQ(sum, static_cast<float>(static_cast<long double>(d_y) * (127 + 2147483648.0L)));
  });
}

// ---- a true derivative, in f64: y = (q - zp) * s is bilinear in q (a real number) and s ----

struct F64Problem {
  QuantizeDesc d;
  std::vector<double> d_y, scale, d_q, d_scale;
  std::vector<std::int8_t> q;
  std::vector<std::int32_t> zero_point;

  explicit F64Problem(QuantizeDesc desc) : d(desc) {
    d.element = DType::f64;
    Rng rng(11);
    const auto n = static_cast<std::size_t>(d.tensor_shape().numel());
    const auto params = static_cast<std::size_t>(d.param_shape().numel());
    for (std::size_t i = 0; i < n; ++i) {
      d_y.push_back(rng.normal());
      q.push_back(static_cast<std::int8_t>(rng.below(256) - 128));
    }
    for (std::size_t i = 0; i < params; ++i) {
      scale.push_back(0.01 + rng.uniform());
      zero_point.push_back(static_cast<std::int32_t>(rng.below(21) - 10));
    }
    d_q.resize(n);
    d_scale.resize(params);
  }

  static ConstView input(const auto& values, const Shape& shape) {
    return view(values.data(), shape);
  }
  void backward() {
    const Status s =
        run_op<Op>(d, {input(d_y, d.tensor_shape()), input(q, d.tensor_shape()),
                       input(scale, d.param_shape()), input(zero_point, d.param_shape()),
                       view(d_q.data(), d.tensor_shape()), view(d_scale.data(), d.param_shape())});
    ASSERT_TRUE(s.ok()) << s.message();
  }
  std::vector<double> forward(const std::vector<double>& at_scale) const {
    std::vector<double> y(q.size());
    const Status s = run_op<DequantizePerGroup>(
        d, {input(q, d.tensor_shape()), input(at_scale, d.param_shape()),
            input(zero_point, d.param_shape()), view(y.data(), d.tensor_shape())});
    EXPECT_TRUE(s.ok()) << s.message();
    return y;
  }
};

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

const QuantizeDesc kGeometries[] = {
    {.outer_size = 3, .axis_size = 80, .group_size = 40},
    {.outer_size = 4, .axis_size = 50, .granularity = Granularity::token},
    {.outer_size = 5, .axis_size = 7, .inner_size = 3, .granularity = Granularity::channel},
    {.outer_size = 9, .axis_size = 33, .granularity = Granularity::channel},
    {.outer_size = 6, .axis_size = 31, .granularity = Granularity::tensor}};

TEST(DequantizePerGroupBackward, AgreesWithFiniteDifferences) {
  for (const QuantizeDesc& desc : kGeometries) {
    F64Problem p(desc);
    p.backward();
    for (std::size_t i = 0; i < p.scale.size(); ++i) {
      constexpr double kStep = 1e-4;
      auto up = p.scale, down = p.scale;
      up[i] += kStep;
      down[i] -= kStep;
      const double difference =
          (dot(p.d_y, p.forward(up)) - dot(p.d_y, p.forward(down))) / 2 / kStep;
      // The loss is linear in the scale, so only rounding is left: eps * sum|terms| / step.
      EXPECT_NEAR(p.d_scale[i], difference, 1e-7);
    }
  }
}

TEST(DequantizePerGroupBackward, IsTheAdjoint) {
  for (const QuantizeDesc& desc : kGeometries) {
    F64Problem p(desc);
    p.backward();
    const GroupGeometry g = p.d.geometry();
    Rng rng(12);
    // J v along a scale direction is dequantise with v as the scale; along codes it is v * s.
    std::vector<double> along_scale(p.scale.size()), along_codes(p.q.size());
    for (double& v : along_scale) v = rng.normal();
    for (double& v : along_codes) v = rng.normal();
    EXPECT_NEAR(dot(p.forward(along_scale), p.d_y), dot(along_scale, p.d_scale), 1e-9);
    std::vector<double> jv(p.q.size());
    for (std::size_t i = 0; i < jv.size(); ++i) {
      const auto at = static_cast<std::int64_t>(i);
      jv[i] = along_codes[i] *
              p.scale[static_cast<std::size_t>(g.param(at / g.row_length, at % g.row_length))];
    }
    EXPECT_NEAR(dot(jv, p.d_y), dot(along_codes, p.d_q), 1e-9);
  }
}

TEST(DequantizePerGroupBackward, BitsDoNotDependOnTheThreads) {
  const QuantizeDesc d{.outer_size = 3,
                       .axis_size = 500'009,
                       .granularity = Granularity::tensor,
                       .element = DType::f32};
  Rng rng(5);
  const auto n = static_cast<std::size_t>(d.tensor_shape().numel());
  std::vector<float> d_y(n), want(1), scale(1, 0.5f);
  std::vector<std::int8_t> q(n);
  for (std::size_t i = 0; i < n; ++i) {
    d_y[i] = static_cast<float>(rng.uniform() - 0.5);
    q[i] = static_cast<std::int8_t>(i % 251);
  }
  const auto sum = [&](const char* kernel) {
    float out = 0;
    const Status s = run_op<Op>(d,
                                {F64Problem::input(d_y, d.tensor_shape()),
                                 F64Problem::input(q, d.tensor_shape()),
                                 F64Problem::input(scale, {1}),
                                 {},
                                 {},
                                 view(&out, {1})},
                                kernel);
    EXPECT_TRUE(s.ok()) << s.message();
    return out;
  };
  want[0] = sum("ref");
  for_each_kernel([&](const char* kernel) {
    for (const int threads : {1, 2, 3, 16}) {
      set_num_threads(threads);
      EXPECT_EQ(sum(kernel), want[0]) << threads << " threads";
    }
  });
  set_num_threads(0);
}

}  // namespace
}  // namespace bittern
