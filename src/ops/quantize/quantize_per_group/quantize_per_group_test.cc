#include <gtest/gtest.h>

#include "ops/quantize/quantize_test.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using namespace oracle;
using Op = QuantizePerGroup;

TEST(QuantizePerGroup, MatchesRefEverywhere) { expect_parity("quantize_per_group"); }
TEST(QuantizePerGroup, MatchesRefOnEveryHalf) { expect_parity_on_every_half<Op>(12, 1); }
TEST(QuantizePerGroup, RefusesDescriptors) { expect_quantize_desc_errors<Op>(); }
TEST(QuantizePerGroup, EmptyIsOk) { expect_empty_is_ok<Op>(); }
TEST(QuantizePerGroup, RefusesOperands) {
  expect_operand_errors<Op>({.outer_size = 2, .axis_size = 128, .group_size = 64});
  expect_operand_errors<Op>({.outer_size = 3,
                             .axis_size = 5,
                             .inner_size = 4,
                             .granularity = Granularity::channel,
                             .q_min = 0,
                             .q_max = 255,
                             .element = DType::bf16,
                             .code = DType::u8,
                             .f32_scale = true});
}

// One row, one scale.
template <class Q = std::int8_t, class X = float>
std::vector<int> quantize(const char* kernel, const std::vector<X>& x, const X scale,
                          const std::int32_t zero_point,
                          std::int32_t q_min = std::numeric_limits<Q>::min(),
                          std::int32_t q_max = std::numeric_limits<Q>::max()) {
  const auto n = static_cast<std::int64_t>(x.size());
  const QuantizeDesc d{.outer_size = 1,
                       .axis_size = n,
                       .granularity = Granularity::tensor,
                       .q_min = q_min,
                       .q_max = q_max,
                       .element = dtype_of<X>(),
                       .code = dtype_of<Q>()};
  std::vector<Q> q(x.size());
  const Status s = run_op<Op>(
      d,
      {view(x.data(), {1, n}), view(&scale, {1}), view(&zero_point, {1}), view(q.data(), {1, n})},
      kernel);
  EXPECT_TRUE(s.ok()) << s.message();
  return {q.begin(), q.end()};
}
using Codes = std::vector<int>;

TEST(QuantizePerGroup, TiesGoToEvenBeforeTheZeroPoint) {
  for_each_kernel([](const char* k) {
    EXPECT_EQ(quantize(k, {0.5f, 1.5f, 2.5f, -0.5f, -1.5f, -2.5f}, 1.0f, 0),
              (Codes{0, 2, 2, 0, -2, -2}));
    // An odd zero point added first would give 2 2 4 0 0 -2.
    EXPECT_EQ(quantize(k, {0.5f, 1.5f, 2.5f, -0.5f, -1.5f, -2.5f}, 1.0f, 1),
              (Codes{1, 3, 3, 1, -1, -1}));
    // floor(z + 1/2) would give 1.
    EXPECT_EQ(quantize(k, {0.49999997f, -0.49999997f}, 1.0f, 0), (Codes{0, 0}));
    EXPECT_EQ(quantize<std::int8_t>(k, std::vector<double>{0.5, 1.5, 0.49999999999999994}, 1.0, 1),
              (Codes{1, 3, 1}));
  });
}

TEST(QuantizePerGroup, DividesTruly) {
  for_each_kernel([](const char* k) {
    const float s = 0.3f;
    // 3.75 / s is the tie 12.5, and 2.25 / s is just below 7.5; times 1 / s gives 13 and 8.
    EXPECT_EQ(quantize(k, {3.7500002f, 2.25f}, s, 0), (Codes{12, 7}));
    for (int i = 1; i < 120; ++i) {
      const float tie = (static_cast<float>(i) + 0.5f) * s;
      EXPECT_EQ(quantize(k, {tie}, s, 0), (Codes{static_cast<int>(std::nearbyint(tie / s))}));
    }
  });
}

TEST(QuantizePerGroup, ClampsAtBothEnds) {
  for_each_kernel([](const char* k) {
    EXPECT_EQ(quantize(k, {127.4f, 127.5f, 1e30f, -128.4f, -128.5f, -1e30f}, 1.0f, 0),
              (Codes{127, 127, 127, -128, -128, -128}));
    EXPECT_EQ(quantize<std::uint8_t>(k, {255.4f, 256.0f, 0.4f, -0.6f, 127.5f}, 1.0f, 0),
              (Codes{255, 255, 0, 0, 128}));
    EXPECT_EQ(quantize<std::uint8_t>(k, {3.0f, 9.0f, -3.0f}, 1.0f, 250), (Codes{253, 255, 247}));
    EXPECT_EQ(quantize(k, {7.6f, -9.0f, 2.2f}, 1.0f, 0, -8, 7), (Codes{7, -8, 2}));
    EXPECT_EQ(quantize(k, {-5.0f, 5.0f}, 1.0f, 100, 3, 3), (Codes{3, 3}));
  });
}

TEST(QuantizePerGroup, InfinitiesSaturateAndNanCountsAsZero) {
  for_each_kernel([](const char* k) {
    EXPECT_EQ(quantize(k, {kInf, -kInf, kNaN}, 0.5f, 7), (Codes{127, -128, 7}));
    EXPECT_EQ(quantize(k, {kInf, -kInf, kNaN}, -0.5f, 7), (Codes{-128, 127, 7}));
    EXPECT_EQ(quantize(k, {kInf, -kInf, 1.0f}, kInf, 7), (Codes{7, 7, 7}));
    EXPECT_EQ(quantize(k, {kNaN, 0.0f}, 1.0f, 300), (Codes{127, 127}));
  });
}

TEST(QuantizePerGroup, DegenerateScales) {
  for_each_kernel([](const char* k) {
    for (const float s : {0.0f, -0.0f, kNaN}) {
      EXPECT_EQ(quantize(k, {5.0f, -5.0f, 0.0f, kInf, kNaN}, s, 3), (Codes{3, 3, 3, 3, 3}));
      EXPECT_EQ(quantize(k, {5.0f}, s, -1000), (Codes{-128}));
    }
    EXPECT_EQ(quantize(k, {3.0f, -4.5f}, -1.0f, 0), (Codes{-3, 4}));
    EXPECT_EQ(quantize(k, {0x5p-149f, -0x3p-149f, 1.0f, -1.0f}, 0x1p-149f, 0),
              (Codes{5, -3, 127, -128}));
    EXPECT_EQ(quantize(k, {3e38f, -3e38f}, 3e38f, 1), (Codes{2, 0}));
  });
}

TEST(QuantizePerGroup, ZeroPointsAsFarAsTheyGo) {
  for_each_kernel([](const char* k) {
    // R(x/s) + zp as if exact: 2^31 - 2^31 = 0, the next float above is 256 more.
    EXPECT_EQ(
        quantize(k, {0x1p31f, 0x1p31f + 256, 0x1p31f - 128, 0.0f, kInf, -kInf}, 1.0f, kIntMin),
        (Codes{0, 127, -128, -128, 127, -128}));
    EXPECT_EQ(quantize(k, {-0x1p31f, -0x1p31f + 128, 0.0f, kInf, -kInf}, 1.0f, kIntMax),
              (Codes{-1, 127, 127, 127, -128}));
    // f32 cannot hold 2^24 + 1.
    EXPECT_EQ(quantize(k, {-0x1p24f, -0x1p24f - 2, -0x1p24f + 1}, 1.0f, (1 << 24) + 1),
              (Codes{1, -1, 2}));
    EXPECT_EQ(quantize<std::uint8_t>(k, std::vector<double>{2147483649.0, 0.5}, 1.0, kIntMin),
              (Codes{1, 0}));
  });
}

TEST(QuantizePerGroup, EachGranularityFindsItsScale) {
  // x[i][j] = 24; the code tells which scale was used: 24 / s.
  const std::vector<float> x(2 * 6, 24.0f), scale = {1, 2, 3, 4, 6, 8};
  const auto codes = [&](const QuantizeDesc& d, const char* kernel) {
    std::vector<std::int8_t> q(x.size());
    EXPECT_TRUE(run_op<Op>(d,
                           {view(x.data(), d.tensor_shape()),
                            view(scale.data(), d.param_shape()),
                            {},
                            view(q.data(), d.tensor_shape())},
                           kernel)
                    .ok());
    return Codes(q.begin(), q.end());
  };
  for_each_kernel([&](const char* k) {
    EXPECT_EQ(codes({.outer_size = 2, .axis_size = 6, .group_size = 2}, k),
              (Codes{24, 24, 12, 12, 8, 8, 6, 6, 4, 4, 3, 3}));
    EXPECT_EQ(codes({.outer_size = 2, .axis_size = 6, .granularity = Granularity::token}, k),
              (Codes{24, 24, 24, 24, 24, 24, 12, 12, 12, 12, 12, 12}));
    EXPECT_EQ(codes({.outer_size = 2, .axis_size = 6, .granularity = Granularity::channel}, k),
              (Codes{24, 12, 8, 6, 4, 3, 24, 12, 8, 6, 4, 3}));
    EXPECT_EQ(
        codes(
            {.outer_size = 2, .axis_size = 2, .inner_size = 3, .granularity = Granularity::channel},
            k),
        (Codes{24, 24, 24, 12, 12, 12, 24, 24, 24, 12, 12, 12}));
    EXPECT_EQ(codes({.outer_size = 2, .axis_size = 6, .granularity = Granularity::tensor}, k),
              Codes(12, 24));
  });
}

// Beyond the size where outputs bypass the cache, from an address that no line starts at.
TEST(QuantizePerGroup, MatchesRefWhereOutputsAreStreamed) {
  const QuantizeDesc d{.outer_size = 3, .axis_size = 96 * 8192, .group_size = 96};
  std::vector<float> x(3 * 96 * 8192), scale(3 * 8192);
  Rng rng(5);
  for (float& v : x) v = static_cast<float>(rng.uniform() * 20 - 10);
  for (float& v : scale) v = static_cast<float>(rng.uniform() + 0.05);
  for (const std::int64_t padding : {0, 7}) {
    const std::int64_t stride = d.axis_size + padding;
    std::vector<std::int8_t> want(static_cast<std::size_t>(3 * stride) + 64), got = want;
    const auto run_into = [&](std::vector<std::int8_t>& q, const char* kernel) {
      return run_op<Op>(d,
                        {as_const(view(x.data(), d.tensor_shape())),
                         as_const(view(scale.data(), d.param_shape())),
                         {},
                         view(q.data() + 5, d.tensor_shape(), stride)},
                        kernel);
    };
    ASSERT_TRUE(run_into(want, "ref").ok());
    for (const cpu::Isa isa : cpu::available_isas()) {
      cpu::force_isa(isa);
      std::fill(got.begin(), got.end(), std::int8_t{0});
      ASSERT_TRUE(run_into(got, "cpu").ok());
      EXPECT_TRUE(got == want) << cpu::name(isa);
    }
    cpu::force_isa(cpu::Isa::none);
  }
}

}  // namespace
}  // namespace bittern
