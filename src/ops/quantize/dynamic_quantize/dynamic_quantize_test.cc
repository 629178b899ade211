#include <gtest/gtest.h>

#include "ops/quantize/quantize_test.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using namespace oracle;
using Op = DynamicQuantize;

TEST(DynamicQuantize, MatchesRefEverywhere) { expect_parity("dynamic_quantize"); }
TEST(DynamicQuantize, RefusesDescriptors) { expect_quantize_desc_errors<Op>(); }
TEST(DynamicQuantize, RefusesOperands) {
  expect_operand_errors<Op>(
      {.outer_size = 2, .axis_size = 128, .group_size = 64, .symmetric = false});
}

TEST(DynamicQuantize, RefusesRangesWithoutRoom) {
  QuantizeDesc d{.outer_size = 1, .axis_size = 64, .group_size = 64, .q_min = -8, .q_max = 0};
  expect_error(Plan<Op>::select(d).status(), Code::invalid_argument,
               "dynamic_quantize: q_max: 0, expected at least 1");
  d.symmetric = false;
  EXPECT_TRUE(Plan<Op>::select(d).ok());
  d.q_min = d.q_max = 5;
  expect_error(Plan<Op>::select(d).status(), Code::invalid_argument,
               "dynamic_quantize: q_max: 5, expected at least 6");
}

template <class S>
struct Quantized {
  double scale;
  std::int32_t zero_point;
  std::vector<int> q;
};

// One row, one parameter.
template <class X, class S = X>
Quantized<S> quantize(const char* kernel, const std::vector<double>& values, bool symmetric,
                      std::int32_t q_min, std::int32_t q_max) {
  const auto n = static_cast<std::int64_t>(values.size());
  const QuantizeDesc d{.outer_size = 1,
                       .axis_size = n,
                       .granularity = Granularity::token,
                       .q_min = q_min,
                       .q_max = q_max,
                       .element = dtype_of<X>(),
                       .f32_scale = !std::is_same_v<X, S>,
                       .symmetric = symmetric};
  std::vector<X> x;
  for (const double v : values) x.push_back(from_math<X>(static_cast<Math<X>>(v)));
  S scale{};
  std::int32_t zero_point = 0;
  std::vector<std::int8_t> q(values.size());
  const Status s =
      run_op<Op>(d,
                 {view(std::as_const(x).data(), {1, n}), view(&scale, {1}),
                  symmetric ? MutView{} : view(&zero_point, {1}), view(q.data(), {1, n})},
                 kernel);
  EXPECT_TRUE(s.ok()) << s.message();
  return {static_cast<double>(to_math(scale)), zero_point, {q.begin(), q.end()}};
}
using Codes = std::vector<int>;
constexpr double kLargest = 0x1.fffffep127;

TEST(DynamicQuantize, SymmetricByHand) {
  for_each_kernel([](const char* k) {
    const auto r = quantize<float>(k, {1, -14, 3, 7.5, 2}, true, -8, 7);
    EXPECT_EQ(r.scale, 2);
    EXPECT_EQ(r.q, (Codes{0, -7, 2, 4, 1}));  // 0.5 and 1.5 to even
  });
}

TEST(DynamicQuantize, AsymmetricByHand) {
  for_each_kernel([](const char* k) {
    // lo -1, hi 2: s = 3 / 15, zp = -8 - R(-5) = -3.
    const auto r = quantize<float>(k, {-1, 0, 2, 1}, false, -8, 7);
    EXPECT_EQ(r.scale, 3.0f / 15.0f);
    EXPECT_EQ(r.zero_point, -3);
    EXPECT_EQ(r.q, (Codes{-8, -3, 7, 2}));
    // The range is widened to hold 0, whichever side the data lie on.
    const auto up = quantize<float>(k, {15, 30}, false, -8, 7);
    EXPECT_EQ(up.scale, 2);
    EXPECT_EQ(up.zero_point, -8);
    EXPECT_EQ(up.q, (Codes{0, 7}));  // 7.5 to even: 8
    const auto down = quantize<float>(k, {-15, -30}, false, -8, 7);
    EXPECT_EQ(down.scale, 2);
    EXPECT_EQ(down.zero_point, 7);
    EXPECT_EQ(down.q, (Codes{-1, -8}));
  });
}

TEST(DynamicQuantize, QuantisesWithTheStoredScale) {
  for_each_kernel([](const char* k) {
    // 1 / 127 in bf16 is 0.00787353515625: 0.9375 / s = 119.07 (119.06 with the exact scale).
    const auto r = quantize<bf16>(k, {1, 0.9375}, true, -128, 127);
    EXPECT_EQ(r.scale, 0.00787353515625);
    EXPECT_EQ(r.q, (Codes{127, 119}));
    EXPECT_EQ((quantize<bf16, float>(k, {1}, true, -128, 127).scale), 1.0f / 127.0f);
    // A scale rounded down puts the extreme one code further, where the clamp holds it.
    const auto f = quantize<f16>(k, {1, -1}, true, -128, 127);
    EXPECT_EQ(f.q[0], 127);
  });
}

TEST(DynamicQuantize, OnlyFiniteValuesCount) {
  for_each_kernel([](const char* k) {
    const auto r = quantize<float>(k, {kInf, 7, kNaN, -kInf, -3}, true, -8, 7);
    EXPECT_EQ(r.scale, 1);
    EXPECT_EQ(r.q, (Codes{7, 7, 0, -8, -3}));
    const auto a = quantize<float>(k, {kInf, kNaN, -kInf}, false, -8, 7);
    EXPECT_EQ(a.scale, 1);
    EXPECT_EQ(a.zero_point, -8);
    EXPECT_EQ(a.q, (Codes{7, -8, -8}));
  });
}

TEST(DynamicQuantize, DegenerateScales) {
  for_each_kernel([](const char* k) {
    for (const bool symmetric : {true, false})
      EXPECT_EQ(quantize<float>(k, {0, -0.0, 0}, symmetric, -8, 7).scale, 1);
    // Underflow: the scale rounds to 0, or to the least denormal.
    EXPECT_EQ(quantize<float>(k, {0x1p-149}, true, -8, 7).scale, 1);
    EXPECT_EQ(quantize<float>(k, {4 * 0x1p-149}, true, -8, 7).scale, 0x1p-149);
    EXPECT_EQ(quantize<f16>(k, {0x1p-24}, true, -8, 7).scale, 1);
    EXPECT_EQ((quantize<f16, float>(k, {0x1p-24}, true, -8, 7).scale), 0x1p-24f / 7);
  });
}

TEST(DynamicQuantize, HugeRanges) {
  for_each_kernel([](const char* k) {
    // hi - lo overflows; the scale does not.
    const auto r = quantize<float>(k, {kLargest, -kLargest, 0}, false, -8, 7);
    EXPECT_EQ(r.scale, static_cast<float>(kLargest) / 15 * 2);
    EXPECT_EQ(r.zero_point, 0);  // -8 - R(-7.5)
    EXPECT_EQ(r.q, (Codes{7, -8, 0}));
    // It would with one step, and is held at the largest finite value.
    EXPECT_EQ(quantize<float>(k, {kLargest, -kLargest}, false, 0, 1).scale, kLargest);
    EXPECT_EQ(quantize<f16>(k, {65504, -65504}, false, 0, 1).scale, 65504);
    EXPECT_EQ(quantize<bf16>(k, {0x1.fep127, -0x1.fep127}, false, 0, 1).scale, 0x1.fep127);
    EXPECT_EQ(quantize<float>(k, {kLargest}, true, 0, 1).scale, kLargest);
  });
}

// A parameter without elements.
TEST(DynamicQuantize, NoElements) {
  for_each_kernel([](const char* k) {
    const QuantizeDesc d{
        .outer_size = 0, .axis_size = 3, .granularity = Granularity::channel, .symmetric = false};
    float scale[3] = {};
    std::int32_t zero_point[3] = {};
    ASSERT_TRUE(run_op<Op>(d, {{}, view(scale, {3}), view(zero_point, {3}), {}}, k).ok());
    for (int c = 0; c < 3; ++c) {
      EXPECT_EQ(scale[c], 1);
      EXPECT_EQ(zero_point[c], -128);
    }
  });
}

// What comes back differs from x by at most half a step and the rounding of the stored scale, where
// the clamp did not act.
TEST(DynamicQuantize, RoundTrips) {
  QuantizeDesc d{.outer_size = 4, .axis_size = 256, .group_size = 64};
  for (const bool symmetric : {true, false}) {
    d.symmetric = symmetric;
    Problem<Op> p = make_problem<Op>(d, 9, {}, false);
    Rng rng(10);
    for (std::int64_t i = 0; i < 4 * 256; ++i) put(p.args.x, i, rng.normal());
    ASSERT_TRUE(run_op<Op>(d, p.args).ok());
    std::vector<float> y(4 * 256);
    ASSERT_TRUE(
        run_op<DequantizePerGroup>(d, {as_const(p.args.q), as_const(p.args.scale),
                                       symmetric ? ConstView{} : as_const(p.args.zero_point),
                                       view(y.data(), d.tensor_shape())})
            .ok());
    for (std::int64_t i = 0; i < 4 * 256; ++i) {
      const double s = get(as_const(p.args.scale), i / 64);
      // Asymmetric: the rounded zero point moves the range by up to half a step.
      EXPECT_NEAR(y[static_cast<std::size_t>(i)], get(p.args.x, i),
                  (symmetric ? 0.5001 : 1.001) * s);
    }
  }
}

}  // namespace
}  // namespace bittern
