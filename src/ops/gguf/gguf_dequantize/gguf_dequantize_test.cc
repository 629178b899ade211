#include <array>
#include <limits>

#include "oracle/op_test.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using oracle::expect_error;
using oracle::expect_ok;
using oracle::kBothKernels;
using oracle::run_op;

constexpr std::uint8_t kOne = 0x3c, kTwo = 0x40, kHalf = 0x38;  // high bytes of f16 1, 2, 0.5

TEST(GgufDequantize, MatchesRefEverywhere) { oracle::expect_parity("gguf_dequantize"); }

// One block, whose bytes are zero but for those given.
std::vector<float> weights(BlockType type, std::vector<std::pair<int, std::uint8_t>> bytes,
                           std::string_view kernel) {
  const GgufDesc d{1, block_size(type).weights, type};
  std::vector<std::uint8_t> block(static_cast<std::size_t>(d.row_bytes()));
  for (const auto& [at, value] : bytes) block[static_cast<std::size_t>(at)] = value;
  std::vector<float> y(static_cast<std::size_t>(d.axis_size), -99);
  expect_ok(run_op<GgufDequantize>(
      d, {view(std::as_const(block).data(), d.block_shape()), view(y.data(), d.tensor_shape())},
      kernel));
  return y;
}

TEST(GgufDequantize, SmallBlocksByHand) {
  for (const auto kernel : kBothKernels) {
    auto y = weights(BlockType::q4_0, {{1, kTwo}, {2, 0xF0}, {17, 0x9A}}, kernel);
    EXPECT_EQ(y[0], 2.0f * (0 - 8));
    EXPECT_EQ(y[16], 2.0f * (15 - 8));
    EXPECT_EQ(y[15], 2.0f * (10 - 8));
    EXPECT_EQ(y[31], 2.0f * (9 - 8));
    EXPECT_EQ(y[1], -16.0f);

    y = weights(BlockType::q4_1, {{1, kTwo}, {3, kHalf}, {5, 0x7C}}, kernel);
    EXPECT_EQ(y[1], 2.0f * 12 + 0.5f);
    EXPECT_EQ(y[17], 2.0f * 7 + 0.5f);
    EXPECT_EQ(y[0], 0.5f);

    y = weights(BlockType::q5_0, {{1, kOne}, {2, 0x02}, {5, 0x80}, {7, 0x03}, {21, 0xF0}}, kernel);
    EXPECT_EQ(y[0], -16.0f);
    EXPECT_EQ(y[1], 16 + 3 - 16.0f);
    EXPECT_EQ(y[31], 16 + 15 - 16.0f);

    y = weights(BlockType::q5_1, {{1, kOne}, {3, kHalf}, {6, 0x01}, {8, 0x05}}, kernel);
    EXPECT_EQ(y[0], 5.5f);
    EXPECT_EQ(y[16], 16.5f);

    y = weights(BlockType::q8_0, {{1, kHalf}, {2, 0x80}, {33, 0x7F}}, kernel);
    EXPECT_EQ(y[0], -64.0f);
    EXPECT_EQ(y[31], 63.5f);
  }
}

TEST(GgufDequantize, LargeBlocksByHand) {
  for (const auto kernel : kBothKernels) {
    // Weight 16 * 9 + 5 = 149: group 9, h = 1, k = 0, l = 21.
    auto y = weights(BlockType::q2_k, {{9, 0x35}, {16 + 32 + 21, 0x02}, {81, kTwo}, {83, kHalf}},
                     kernel);
    EXPECT_EQ(y[149], 2.0f * 5 * 2 - 0.5f * 3);
    EXPECT_EQ(y[148], -1.5f);
    EXPECT_EQ(y[0], 0.0f);

    // Weight 16 * 13 + 1 = 209: group 13, h = 1, k = 2, l = 17, bit 6 of hmask; scale 0b11'1010.
    y = weights(BlockType::q3_k,
                {{17, 0x40}, {32 + 32 + 17, 0x10}, {96 + 5, 0xA0}, {96 + 9, 0xC0}, {109, kTwo}},
                kernel);
    EXPECT_EQ(y[209], 2.0f * (0b111010 - 32) * (1 + 4 - 4));
    EXPECT_EQ(y[208], 2.0f * (0b111010 - 32) * -4);
    EXPECT_EQ(y[0], 2.0f * -32 * -4);

    // Group 6 = 4 + 2: scale 0b10'0011, minimum 0b01'0101; its weight 7 in the low half.
    y = weights(BlockType::q4_k,
                {{1, kTwo},
                 {3, kHalf},
                 {4 + 2, 0x80},
                 {4 + 6, 0x40},
                 {4 + 10, 0x53},
                 {16 + 32 * 3 + 7, 0x0B}},
                kernel);
    EXPECT_EQ(y[32 * 6 + 7], 2.0f * 0b100011 * 11 - 0.5f * 0b010101);
    EXPECT_EQ(y[32 * 6 + 8], -0.5f * 0b010101);
    EXPECT_EQ(y[32 * 7 + 7], 0.0f);

    // Group 1: scale 63 in byte 1, minimum 62 in byte 5; weight 31 in the high half.
    y = weights(BlockType::q5_k,
                {{1, kTwo}, {3, kHalf}, {5, 63}, {9, 62}, {16 + 31, 0x02}, {48 + 31, 0xD0}},
                kernel);
    EXPECT_EQ(y[63], 2.0f * 63 * (13 + 16) - 0.5f * 62);
    EXPECT_EQ(y[62], -31.0f);

    // Weight 128 + 96 + 3 = 227: group 14, high half of ql[64 + 35], bits 6 and 7 of qh[32 + 3].
    y = weights(BlockType::q6_k, {{64 + 35, 0xE0}, {128 + 35, 0xC0}, {192 + 14, 0xFD}, {209, kTwo}},
                kernel);
    EXPECT_EQ(y[227], 2.0f * -3 * (48 + 14 - 32));
    EXPECT_EQ(y[226], 2.0f * -3 * -16 * 2);
  }
}

TEST(GgufDequantize, TablesByHand) {
  const float inf = std::numeric_limits<float>::infinity();
  for (const auto kernel : kBothKernels) {
    // The first 16 weights are the low halves.
    auto y = weights(BlockType::iq4_nl, {{1, kTwo}, {2, 0xF0}, {17, 0x87}}, kernel);
    EXPECT_EQ(y[0], 2.0f * -127);
    EXPECT_EQ(y[16], 2.0f * 113);
    EXPECT_EQ(y[15], 2.0f * -10);
    EXPECT_EQ(y[31], 2.0f * 1);
    std::vector<std::pair<int, std::uint8_t>> every = {{1, kOne}};
    for (int q = 0; q < 16; ++q) every.push_back({2 + q, static_cast<std::uint8_t>(q)});
    y = weights(BlockType::iq4_nl, every, kernel);
    const float values[] = {-127, -104, -83, -65, -49, -35, -22, -10,
                            1,    13,   25,  38,  53,  69,  89,  113};
    for (std::size_t q = 0; q < 16; ++q) EXPECT_EQ(y[q], values[q]) << q;

    // Group 5: low bits in the high half of byte 4 + 2, high bits 2 and 3 of byte 3.
    y = weights(BlockType::iq4_xs,
                {{1, kTwo}, {3, 0x08}, {6, 0xB0}, {8 + 80 + 3, 0x0F}, {8 + 80 + 4, 0x80}}, kernel);
    EXPECT_EQ(y[32 * 5 + 3], 2.0f * (0b101011 - 32) * 113);
    EXPECT_EQ(y[32 * 5 + 4 + 16], 2.0f * (0b101011 - 32) * 1);
    EXPECT_EQ(y[32 * 5], 2.0f * (0b101011 - 32) * -127);
    EXPECT_EQ(y[32 * 4], 2.0f * -32 * -127);
    EXPECT_EQ(y[32 * 6], 2.0f * -32 * -127);

    // e = 128 is a scale of 1 for the doubled values: half of OCP's 2.
    every[0] = {0, 128};
    for (int q = 0; q < 16; ++q) every[static_cast<std::size_t>(q) + 1].first = 1 + q;
    y = weights(BlockType::mxfp4, every, kernel);
    const float doubled[] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    for (std::size_t q = 0; q < 16; ++q) EXPECT_EQ(y[q], doubled[q]) << q;
    EXPECT_FALSE(std::signbit(y[8]));
    // The scale at both ends: 2^-128 and 2^-127 are subnormal, 2^127 is finite, 12 times it is not.
    y = weights(BlockType::mxfp4, {{0, 0}, {1, 0x97}}, kernel);
    EXPECT_EQ(y[0], 12 * 0x1p-128f);
    EXPECT_EQ(y[16], -0x1p-128f);
    EXPECT_EQ(weights(BlockType::mxfp4, {{0, 1}, {1, 0x01}}, kernel)[0], 0x1p-127f);
    EXPECT_EQ(weights(BlockType::mxfp4, {{0, 2}, {1, 0x01}}, kernel)[0], 0x1p-126f);
    y = weights(BlockType::mxfp4, {{0, 255}, {1, 0x91}, {2, 0xF7}}, kernel);
    EXPECT_EQ(y[0], 0x1p127f);
    EXPECT_EQ(y[16], -0x1p127f);
    EXPECT_EQ(y[1], inf);
    EXPECT_EQ(y[17], -inf);
    EXPECT_EQ(y[2], 0.0f);
  }
}

TEST(GgufDequantize, FollowsIeee) {
  const float inf = std::numeric_limits<float>::infinity();
  for (const auto kernel : kBothKernels) {
    // -0 times a positive code and -1 times code 0 are -0.
    EXPECT_TRUE(std::signbit(weights(BlockType::q4_0, {{1, 0x80}, {2, 9}}, kernel)[0]));
    EXPECT_TRUE(std::signbit(weights(BlockType::q4_0, {{1, 0xBC}, {2, 8}}, kernel)[0]));
    // Infinity times 0 is NaN.
    const auto y = weights(BlockType::q4_0, {{1, 0x7C}, {2, 0x98}}, kernel);
    EXPECT_TRUE(std::isnan(y[0]));
    EXPECT_EQ(y[16], inf);
    EXPECT_EQ(y[1], -inf);
    // The least subnormal.
    EXPECT_EQ(weights(BlockType::q8_0, {{0, 1}, {2, 0xFF}}, kernel)[0], -0x1p-24f);
  }
}

TEST(GgufDequantize, HalfResultsAreRoundedOnce) {
  // 2049 * 1 lies between two f16: s = 683, q = 3.
  const GgufDesc d{1, 32, BlockType::q8_0, DType::f16};
  std::vector<std::uint8_t> block(34);
  block[0] = 0x56, block[1] = 0x61;  // 683
  block[2] = 3, block[3] = 0x7F;
  for (const auto kernel : kBothKernels) {
    std::vector<f16> y(32);
    expect_ok(run_op<GgufDequantize>(
        d, {view(std::as_const(block).data(), d.block_shape()), view(y.data(), d.tensor_shape())},
        kernel));
    EXPECT_EQ(to_f32(y[0]), 2048.0f);
    EXPECT_TRUE(std::isinf(to_f32(y[1])));
  }
}

TEST(GgufDequantize, Errors) {
  std::vector<std::uint8_t> blocks(288);
  std::vector<float> y(512, 7);
  const GgufDesc good{2, 256, BlockType::q4_k};
  const GgufDequantize::Args args{view(std::as_const(blocks).data(), good.block_shape()),
                                  view(y.data(), good.tensor_shape())};
  const auto with = [&](auto change) {
    GgufDesc d = good;
    change(d);
    return run_op<GgufDequantize>(d, args);
  };
  using D = GgufDesc&;
  const Code bad = Code::invalid_argument;
  expect_error(with([](D d) { d.outer_size = -1; }), bad,
               "gguf_dequantize: outer_size: -1, expected at least 0");
  expect_error(with([](D d) { d.axis_size = 288; }), bad,
               "gguf_dequantize: axis_size: 288, expected a multiple of 256, the block of Q4_K");
  expect_error(with([](D d) { d.type = static_cast<BlockType>(13); }), bad,
               "gguf_dequantize: type: 13, expected 0..12");
  expect_error(with([](D d) { d.element = DType::f64; }), Code::unsupported,
               "gguf_dequantize: element: f64, expected f32, f16 or bf16");
  expect_error(with([](D d) { d.type = BlockType::q5_k; }), bad,
               "gguf_dequantize: blocks: shape [2,144], expected [2,176] = [outer_size,bytes]");
  expect_error(with([](D d) { d.outer_size = std::int64_t{1} << 52; }), bad,
               "gguf_dequantize: sizes: more than 2^59 elements");
  EXPECT_EQ(y, std::vector<float>(512, 7));
  expect_ok(run_op<GgufDequantize>(good, args));
}

}  // namespace
}  // namespace bittern
