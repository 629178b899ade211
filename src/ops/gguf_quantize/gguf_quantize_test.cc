#include <limits>

#include "core/blocks.h"
#include "oracle/op_test.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using oracle::expect_error;
using oracle::expect_ok;
using oracle::kBothKernels;
using oracle::run_op;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

TEST(GgufQuantize, MatchesRefEverywhere) { oracle::expect_parity("gguf_quantize"); }

std::vector<std::uint8_t> quantize(const GgufDesc& d, const std::vector<float>& w,
                                   std::string_view kernel = {}) {
  std::vector<std::uint8_t> blocks(static_cast<std::size_t>(d.outer_size * d.row_bytes()), 0xEE);
  GgufQuantize::Args a;
  a.w = view(w.data(), d.tensor_shape());
  a.blocks = view(blocks.data(), d.block_shape());
  expect_ok(run_op<GgufQuantize>(d, a, kernel));
  return blocks;
}

// One group of 32: the weights given, then zeros.
std::vector<std::uint8_t> small(BlockType type, std::vector<float> w, std::string_view kernel) {
  w.resize(32);
  return quantize({1, 32, type}, w, kernel);
}

int code(BlockType type, const std::vector<std::uint8_t>& block, int j) {
  return block_code(type, block.data(), j);
}

TEST(GgufQuantize, SmallBlocksByHand) {
  for (const auto kernel : kBothKernels) {
    // The first of the two largest makes the scale: d = -8 / -8.
    auto b = small(BlockType::q4_0, {1, -8, 8, 2.5f, -2.5f, 7.4f}, kernel);
    EXPECT_EQ(read_f16(b.data()), 1.0f);
    const int q4_0[] = {1, -8, 7, 3, -2, 7, 0};  // 2.5 and -2.5 go up
    for (int j = 0; j < 7; ++j) EXPECT_EQ(code(BlockType::q4_0, b, j), q4_0[j]) << j;

    b = small(BlockType::q5_0, {16, -3.5f, -16}, kernel);
    EXPECT_EQ(read_f16(b.data()), -1.0f);
    const int q5_0[] = {-16, 4, 15, 0};
    for (int j = 0; j < 4; ++j) EXPECT_EQ(code(BlockType::q5_0, b, j), q5_0[j]) << j;

    b = small(BlockType::q4_1, {-5, 10, 0.5f, 0.49f}, kernel);
    EXPECT_EQ(read_f16(b.data()), 1.0f);
    EXPECT_EQ(read_f16(b.data() + 2), -5.0f);
    const int q4_1[] = {0, 15, 6, 5, 5};
    for (int j = 0; j < 5; ++j) EXPECT_EQ(code(BlockType::q4_1, b, j), q4_1[j]) << j;

    b = small(BlockType::q5_1, {-1, 30, 14.5f}, kernel);
    EXPECT_EQ(read_f16(b.data()), 1.0f);
    const int q5_1[] = {0, 31, 16, 1};
    for (int j = 0; j < 4; ++j) EXPECT_EQ(code(BlockType::q5_1, b, j), q5_1[j]) << j;

    b = small(BlockType::q8_0, {127, -126.5f, 0.5f, -0.5f, 0.49999997f}, kernel);
    EXPECT_EQ(read_f16(b.data()), 1.0f);
    const int q8_0[] = {127, -127, 1, -1, 0};
    for (int j = 0; j < 5; ++j) EXPECT_EQ(code(BlockType::q8_0, b, j), q8_0[j]) << j;
  }
}

TEST(GgufQuantize, WeightsThatNoBlockCanHold) {
  for (const auto kernel : kBothKernels) {
    // The largest weight is 8 * 65504; NaN is 0.
    auto b = small(BlockType::q4_0, {-kInf, kNan, kInf}, kernel);
    EXPECT_EQ(read_f16(b.data()), 65504.0f);
    EXPECT_EQ(code(BlockType::q4_0, b, 0), -8);
    EXPECT_EQ(code(BlockType::q4_0, b, 1), 0);
    EXPECT_EQ(code(BlockType::q4_0, b, 2), 7);

    b = small(BlockType::q4_1, {-1e30f, kNan, kInf}, kernel);
    EXPECT_EQ(read_f16(b.data() + 2), -65504.0f);
    EXPECT_EQ(code(BlockType::q4_1, b, 0), 0);
    EXPECT_EQ(code(BlockType::q4_1, b, 2), 15);

    b = small(BlockType::q8_0, {kInf, -1e9f}, kernel);
    EXPECT_EQ(read_f16(b.data()), 65504.0f);
    EXPECT_EQ(code(BlockType::q8_0, b, 1), -127);

    // A scale whose inverse overflows: every code is the one of 0.
    b = small(BlockType::q4_0, {0x1p-140f, -0x1p-141f}, kernel);
    EXPECT_EQ(read_f16(b.data()), 0.0f);
    EXPECT_EQ(code(BlockType::q4_0, b, 0), 0);
    EXPECT_EQ(code(BlockType::q4_0, b, 1), 0);
  }
}

TEST(GgufQuantize, Errors) {
  const std::vector<float> w(64);
  std::vector<std::uint8_t> blocks(36, 7);
  const GgufDesc good{2, 32, BlockType::q4_0};
  const auto with = [&](auto change) {
    GgufDesc d = good;
    change(d);
    GgufQuantize::Args a;
    a.w = view(w.data(), good.tensor_shape());
    a.blocks = view(blocks.data(), good.block_shape());
    return run_op<GgufQuantize>(d, a);
  };
  using D = GgufDesc&;
  expect_error(with([](D d) { d.axis_size = 33; }), Code::invalid_argument,
               "gguf_quantize: axis_size: 33, expected a multiple of 32, the block of Q4_0");
  expect_error(with([](D d) { d.type = BlockType::q5_1; }), Code::invalid_argument,
               "gguf_quantize: blocks: shape [2,18], expected [2,24]");
  expect_error(with([](D d) {
                 d.type = BlockType::q3_k;
                 d.axis_size = 256;
               }),
               Code::unsupported,
               "gguf_quantize: type: Q3_K, expected Q4_0, Q4_1, Q5_0, Q5_1 or Q8_0");
  EXPECT_EQ(blocks, std::vector<std::uint8_t>(36, 7));
  expect_ok(with([](D) {}));
}

}  // namespace
}  // namespace bittern
