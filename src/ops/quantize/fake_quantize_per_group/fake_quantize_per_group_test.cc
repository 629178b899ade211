#include <gtest/gtest.h>

#include "ops/quantize/quantize_test.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using namespace oracle;
using Op = FakeQuantizePerGroup;

TEST(FakeQuantizePerGroup, MatchesRefEverywhere) { expect_parity("fake_quantize_per_group"); }
TEST(FakeQuantizePerGroup, MatchesRefOnEveryHalf) { expect_parity_on_every_half<Op>(12, 3); }
TEST(FakeQuantizePerGroup, RefusesDescriptors) { expect_quantize_desc_errors<Op>(); }
TEST(FakeQuantizePerGroup, EmptyIsOk) { expect_empty_is_ok<Op>(); }
TEST(FakeQuantizePerGroup, RefusesOperands) {
  expect_operand_errors<Op>({.outer_size = 2, .axis_size = 128, .group_size = 64});
  expect_operand_errors<Op>({.outer_size = 3,
                             .axis_size = 5,
                             .inner_size = 4,
                             .granularity = Granularity::channel,
                             .element = DType::f64});
}

std::vector<float> fake(const char* kernel, const std::vector<float>& x, const float scale,
                        const std::int32_t zero_point, std::int32_t q_min, std::int32_t q_max) {
  const auto n = static_cast<std::int64_t>(x.size());
  const QuantizeDesc d{.outer_size = 1,
                       .axis_size = n,
                       .granularity = Granularity::tensor,
                       .q_min = q_min,
                       .q_max = q_max};
  std::vector<float> y(x.size(), -99);
  const Status s = run_op<Op>(
      d,
      {view(x.data(), {1, n}), view(&scale, {1}), view(&zero_point, {1}), view(y.data(), {1, n})},
      kernel);
  EXPECT_TRUE(s.ok()) << s.message();
  return y;
}
using F32 = std::vector<float>;

TEST(FakeQuantizePerGroup, ByHand) {
  for_each_kernel([](const char* k) {
    EXPECT_EQ(fake(k, {0.3f, 0.25f, 0.75f, 9.0f, -9.0f}, 0.5f, 0, -8, 7),
              (F32{0.5f, 0.0f, 1.0f, 3.5f, -4.0f}));
    // Codes 0..15 around zp 3: values -3 .. 12 steps.
    EXPECT_EQ(fake(k, {-10.0f, 100.0f, 2.5f}, 1.0f, 3, 0, 15), (F32{-3, 12, 2}));
    EXPECT_EQ(fake(k, {kInf, -kInf, kNaN}, 2.0f, 1, -8, 7), (F32{12, -18, 0}));
    EXPECT_EQ(fake(k, {5.0f, kNaN}, 0.0f, 3, -8, 7), (F32{0, 0}));
    for (const float y : fake(k, {5.0f, kNaN}, kNaN, 3, -8, 7)) EXPECT_TRUE(std::isnan(y));
    EXPECT_EQ(fake(k, {3.0f, -5.0f}, -1.0f, 0, -4, 2), (F32{3, -2}));
  });
}

TEST(FakeQuantizePerGroup, AZeroDifferenceHasTheSignOfTheScale) {
  for_each_kernel([](const char* k) {
    for (const float x : {0.3f, -0.3f, 0.0f, -0.0f}) {
      EXPECT_FALSE(std::signbit(fake(k, {x}, 1.0f, 0, -8, 7)[0])) << x;
      EXPECT_TRUE(std::signbit(fake(k, {x}, -1.0f, 0, -8, 7)[0])) << x;
    }
  });
}

TEST(FakeQuantizePerGroup, Any32BitRange) {
  for_each_kernel([](const char* k) {
    // The whole range: what f32 rounds to an integer below 2^31 passes, the rest saturates.
    EXPECT_EQ(fake(k, {3e9f, -3e9f, 12345.5f, 0x1p24f}, 1.0f, 0, kIntMin, kIntMax),
              (F32{0x1p31f, -0x1p31f, 12346.0f, 0x1p24f}));
    // (kIntMax - kIntMin) * 1 = 2^32 - 1, rounded once.
    EXPECT_EQ(fake(k, {kInf, -kInf}, 1.0f, kIntMin, kIntMin, kIntMax), (F32{0x1p32f, 0.0f}));
    // 3 * (2^24 + 1) = 50331651 rounds to 50331652.
    EXPECT_EQ(fake(k, {kInf}, 3.0f, 0, 0, (1 << 24) + 1), (F32{50331652.0f}));
    EXPECT_EQ(fake(k, {70000.25f, -1e6f}, 1.0f, 5, -65536, 65535), (F32{65530, -65541}));
  });
}

TEST(FakeQuantizePerGroup, IsDequantizeOfQuantize) {
  for (const DType element : {DType::f32, DType::f64, DType::f16, DType::bf16}) {
    const QuantizeDesc d{.outer_size = 5, .axis_size = 320, .group_size = 80, .element = element};
    for_each_kernel([&](const char* k) {
      Problem<Op> p = make_problem<Op>(d, 21, {});
      ASSERT_TRUE(run_op<Op>(d, p.args, k).ok());
      std::vector<std::int8_t> q(5 * 320);
      std::vector<std::byte> bytes(5 * 320 * size_of(element));
      ASSERT_TRUE(
          run_op<QuantizePerGroup>(
              d, {p.args.x, p.args.scale, p.args.zero_point, view(q.data(), d.tensor_shape())}, k)
              .ok());
      MutView y = p.args.y;
      y.data = bytes.data();
      ASSERT_TRUE(
          run_op<DequantizePerGroup>(
              d, {as_const(view(q.data(), d.tensor_shape())), p.args.scale, p.args.zero_point, y},
              k)
              .ok());
      for (std::int64_t i = 0; i < 5 * 320; ++i) {
        const double got = get(as_const(p.args.y), i), want = get(as_const(y), i);
        EXPECT_TRUE(std::bit_cast<std::uint64_t>(got) == std::bit_cast<std::uint64_t>(want) ||
                    (std::isnan(got) && std::isnan(want)))
            << i << ": " << got << ", expected " << want;
      }
    });
  }
}

}  // namespace
}  // namespace bittern
