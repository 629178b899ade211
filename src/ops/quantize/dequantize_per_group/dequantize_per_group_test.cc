#include <gtest/gtest.h>

#include "ops/quantize/quantize_test.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using namespace oracle;
using Op = DequantizePerGroup;

TEST(DequantizePerGroup, MatchesRefEverywhere) { expect_parity("dequantize_per_group"); }
TEST(DequantizePerGroup, RefusesDescriptors) { expect_quantize_desc_errors<Op>(); }
TEST(DequantizePerGroup, EmptyIsOk) { expect_empty_is_ok<Op>(); }
TEST(DequantizePerGroup, RefusesOperands) {
  expect_operand_errors<Op>({.outer_size = 2, .axis_size = 128, .group_size = 64});
  expect_operand_errors<Op>({.outer_size = 3,
                             .axis_size = 5,
                             .inner_size = 4,
                             .granularity = Granularity::channel,
                             .element = DType::bf16,
                             .code = DType::u8,
                             .f32_scale = true});
}

template <class X, class Q>
std::vector<X> dequantize(const char* kernel, const std::vector<Q>& q, const X scale,
                          const std::int32_t zero_point) {
  const auto n = static_cast<std::int64_t>(q.size());
  const QuantizeDesc d{.outer_size = 1,
                       .axis_size = n,
                       .granularity = Granularity::token,
                       .element = dtype_of<X>(),
                       .code = dtype_of<Q>()};
  std::vector<X> y(q.size());
  const Status s = run_op<Op>(
      d,
      {view(q.data(), {1, n}), view(&scale, {1}), view(&zero_point, {1}), view(y.data(), {1, n})},
      kernel);
  EXPECT_TRUE(s.ok()) << s.message();
  return y;
}

using S8 = std::vector<std::int8_t>;
using U8 = std::vector<std::uint8_t>;
using F32 = std::vector<float>;

TEST(DequantizePerGroup, ByHand) {
  for_each_kernel([](const char* k) {
    EXPECT_EQ(dequantize(k, S8{-128, 0, 127}, 0.5f, 0), (F32{-64, 0, 63.5f}));
    EXPECT_EQ(dequantize(k, S8{-128, 127}, 2.0f, 127), (F32{-510, 0}));
    EXPECT_EQ(dequantize(k, U8{0, 128, 255}, 0.25f, 128), (F32{-32, 0, 31.75f}));
    EXPECT_EQ(dequantize(k, S8{3, -3}, -1.5f, 1), (F32{-3, 6}));
    // 0 * -1 is -0, and 0 * inf is NaN.
    EXPECT_TRUE(std::signbit(dequantize(k, S8{4}, -1.0f, 4)[0]));
    const F32 y = dequantize(k, S8{4, 5, 3}, kInf, 4);
    EXPECT_TRUE(std::isnan(y[0]));
    EXPECT_EQ(y[1], kInf);
    EXPECT_EQ(y[2], -kInf);
  });
}

TEST(DequantizePerGroup, FarZeroPointsRoundOnce) {
  for_each_kernel([](const char* k) {
    // (127 + 2^31) * 3 = 6442451325 lies between the floats 6442450944 and 6442451456, nearer the
    // second; rounding the difference first gives the first.
    EXPECT_EQ(dequantize(k, S8{127}, 3.0f, kIntMin), (F32{6442451456.0f}));
    EXPECT_EQ(dequantize(k, S8{127}, 1.0f, kIntMin), (F32{0x1p31f}));
    EXPECT_EQ(dequantize(k, S8{-128}, 1.0f, kIntMax), (F32{-0x1p31f}));
    EXPECT_EQ(dequantize(k, S8{127}, 3.0, kIntMin), (std::vector<double>{6442451325.0}));
    // 2^24 + 1, which f32 has not: 3 * (2^24 + 1) = 50331651 rounds to 50331652.
    EXPECT_EQ(dequantize(k, S8{0}, -3.0f, (1 << 24) + 1), (F32{50331652.0f}));
  });
}

TEST(DequantizePerGroup, HalfIsRoundedToNearestEven) {
  for_each_kernel([](const char* k) {
    const auto bits = [](const auto& v) { return v[0].bits; };
    // 257 = 2^8 + 1 is a tie of bf16 (8 bits): to even, 256; 259 to 260.
    EXPECT_EQ(bits(dequantize(k, U8{255}, to_bf16(1.0f), -2)), to_bf16(256.0f).bits);
    EXPECT_EQ(bits(dequantize(k, U8{255}, to_bf16(1.0f), -4)), to_bf16(260.0f).bits);
    EXPECT_EQ(bits(dequantize(k, U8{255}, to_f16(1.0f), -1794)), to_f16(2048.0f).bits);  // 2049
    EXPECT_EQ(bits(dequantize(k, U8{255}, to_f16(512.0f), 0)), to_f16(kInf).bits);
  });
}

// quantise(dequantise(q)) = q, and |x - dequantise(quantise(x))| <= s / 2 inside the range.
template <class X>
void expect_round_trip(std::int32_t zero_point) {
  for_each_kernel([&](const char* k) {
    const QuantizeDesc d{.outer_size = 6,
                         .axis_size = 256,
                         .granularity = Granularity::token,
                         .element = dtype_of<X>()};
    const Shape shape = d.tensor_shape();
    std::vector<std::int8_t> q(6 * 256), again(q.size());
    std::vector<X> scale(6), y(q.size());
    const std::vector<std::int32_t> zero(6, zero_point);
    for (std::size_t i = 0; i < q.size(); ++i) q[i] = static_cast<std::int8_t>(i % 256);
    for (std::size_t i = 0; i < 6; ++i)
      scale[i] = from_math<X>(static_cast<Math<X>>(0.013 * std::pow(3.7, static_cast<double>(i))));
    const auto in = [](const auto& v, const Shape& s) { return view(v.data(), s); };
    ASSERT_TRUE(
        run_op<Op>(
            d, {in(std::as_const(q), shape), in(scale, {6}), in(zero, {6}), view(y.data(), shape)},
            k)
            .ok());
    ASSERT_TRUE(run_op<QuantizePerGroup>(d,
                                         {in(std::as_const(y), shape), in(scale, {6}),
                                          in(zero, {6}), view(again.data(), shape)},
                                         k)
                    .ok());
    EXPECT_EQ(again, q);
  });
}
TEST(DequantizePerGroup, QuantizingAgainGivesTheSameCodes) {
  expect_round_trip<float>(-77);
  expect_round_trip<double>(1 << 30);
  expect_round_trip<f16>(31);
  expect_round_trip<bf16>(0);
}

TEST(DequantizePerGroup, IsWithinHalfAStepOfWhatWasQuantized) {
  const QuantizeDesc d{.outer_size = 2, .axis_size = 640, .group_size = 32};
  std::vector<float> x(1280), scale(40), y(x.size());
  std::vector<std::int32_t> zero(40);
  std::vector<std::int8_t> q(x.size());
  Rng rng(9);
  for (std::size_t i = 0; i < 40; ++i) {
    scale[i] = static_cast<float>(rng.uniform() + 1e-3);
    zero[i] = static_cast<std::int32_t>(rng.below(41) - 20);
  }
  for (std::size_t i = 0; i < x.size(); ++i)
    x[i] = static_cast<float>((rng.uniform() * 255 - 128 - zero[i / 32]) * scale[i / 32]);
  const Shape shape = d.tensor_shape(), params = d.param_shape();
  for_each_kernel([&](const char* k) {
    const auto in = [](const auto& v, const Shape& s) { return view(v.data(), s); };
    ASSERT_TRUE(
        run_op<QuantizePerGroup>(d,
                                 {in(std::as_const(x), shape), in(std::as_const(scale), params),
                                  in(std::as_const(zero), params), view(q.data(), shape)},
                                 k)
            .ok());
    ASSERT_TRUE(run_op<Op>(d,
                           {in(std::as_const(q), shape), in(std::as_const(scale), params),
                            in(std::as_const(zero), params), view(y.data(), shape)},
                           k)
                    .ok());
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double s = scale[i / 32];
      EXPECT_LE(std::abs(double{x[i]} - double{y[i]}), s / 2 + 200 * s * 0x1p-23) << i;
    }
  });
}

}  // namespace
}  // namespace bittern
