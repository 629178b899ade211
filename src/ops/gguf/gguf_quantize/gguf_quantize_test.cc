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

struct Given {
  std::vector<float> scales, biases;
};

std::vector<std::uint8_t> quantize(const GgufDesc& d, const std::vector<float>& w,
                                   std::string_view kernel = {},
                                   const std::vector<float>& importance = {},
                                   const Given& given = {}) {
  std::vector<std::uint8_t> blocks(static_cast<std::size_t>(d.outer_size * d.row_bytes()), 0xEE);
  GgufQuantize::Args a;
  a.w = view(w.data(), d.tensor_shape());
  if (!importance.empty()) a.importance = view(importance.data(), {d.axis_size});
  if (d.given_grid) {
    a.scales = view(given.scales.data(), d.grid_shape());
    a.biases = view(given.biases.data(), d.grid_shape());
  }
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

// ---- the K types ----

constexpr BlockType kSuper[] = {BlockType::q2_k, BlockType::q3_k, BlockType::q4_k, BlockType::q5_k,
                                BlockType::q6_k};

std::vector<float> dequantize(BlockType type, const std::vector<std::uint8_t>& blocks) {
  const BlockSize size = block_size(type);
  std::vector<float> w(blocks.size() / static_cast<std::size_t>(size.bytes) *
                       static_cast<std::size_t>(size.weights));
  for (std::size_t i = 0; i < w.size(); ++i) {
    const auto weights = static_cast<std::size_t>(size.weights);
    const std::uint8_t* block = blocks.data() + i / weights * static_cast<std::size_t>(size.bytes);
    const int j = static_cast<int>(i % weights);
    const GroupGrid grid = block_grid(type, block, j);
    w[i] = grid.s * static_cast<float>(block_code(type, block, j)) - grid.m;
  }
  return w;
}

std::vector<float> gaussian(std::size_t count, std::uint64_t seed) {
  oracle::Rng rng(seed);
  std::vector<float> w(count);
  for (float& x : w) x = static_cast<float>(0.02 * rng.normal());
  return w;
}

double relative_error(const std::vector<float>& w, const std::vector<float>& y,
                      const std::vector<float>& importance = {}) {
  double error = 0, power = 0;
  for (std::size_t i = 0; i < w.size(); ++i) {
    const double c = importance.empty() ? 1 : importance[i % importance.size()];
    error += c * (double{w[i]} - y[i]) * (double{w[i]} - y[i]);
    power += c * double{w[i]} * w[i];
  }
  return error / power;
}

TEST(GgufQuantize, GaussianErrorIsBelowGgmls) {
  // ggml_quantize_chunk of libggml-python 0.20.2 on weights so drawn: 8.8e-2, 2.28e-2, 4.95e-3,
  // 1.27e-3, 3.03e-4.
  const auto w = gaussian(256 * 400, 3);
  const double bounds[][2] = {{6.6e-2, 6.95e-2},
                              {2.0e-2, 2.1e-2},
                              {4.72e-3, 4.86e-3},
                              {1.12e-3, 1.17e-3},
                              {2.70e-4, 2.80e-4}};
  for (std::size_t i = 0; i < std::size(kSuper); ++i) {
    const GgufDesc d{400, 256, kSuper[i]};
    const double error = relative_error(w, dequantize(kSuper[i], quantize(d, w)));
    EXPECT_GT(error, bounds[i][0]) << i;
    EXPECT_LT(error, bounds[i][1]) << i;
  }
}

TEST(GgufQuantize, WhatABlockHoldsComesBack) {
  // A grid of the format itself, all of whose scales, minima and end codes are in use. (Q2_K and
  // Q3_K: below.)
  oracle::Rng rng(5);
  for (const auto kernel : kBothKernels) {
    for (const BlockType type : {BlockType::q4_k, BlockType::q5_k, BlockType::q6_k}) {
      const int last = type == BlockType::q4_k ? 15 : 31;
      std::vector<float> w(256);
      for (int g = 0; g < 8; ++g) {
        const float s = 0.25f * static_cast<float>(g == 5 ? 63 : 20 + 5 * g);
        const float m = 2.0f * static_cast<float>(g == 2 ? 63 : 30 + 3 * g);
        for (int j = 0; j < 32; ++j) {
          const int q = j < 2 ? j * last : static_cast<int>(rng.below(last + 1));
          w[static_cast<std::size_t>(32 * g + j)] = s * static_cast<float>(q) - m;
          if (type != BlockType::q6_k) continue;
          const float sc =
              j < 16 ? 0.5f * static_cast<float>(-128 + 9 * g) : 0.5f * static_cast<float>(50 + g);
          const int code = j % 16 == 0 ? -32 : static_cast<int>(rng.below(64)) - 32;
          w[static_cast<std::size_t>(32 * g + j)] = sc * static_cast<float>(code);
        }
      }
      EXPECT_EQ(dequantize(type, quantize({1, 256, type}, w, kernel)), w)
          << kernel << " " << static_cast<int>(type);
    }
  }
}

TEST(GgufQuantize, WhatASmallBlockHoldsComesBack) {
  // Every code is in every group, so the line through a group's codes is its own; the largest scale
  // and minimum are the last, so d and dmin are the first that are tried.
  oracle::Rng rng(6);
  for (const auto kernel : kBothKernels) {
    std::vector<float> w(256), v(256);
    for (int g = 0; g < 16; ++g) {
      const float s = 0.25f * static_cast<float>(g == 5 ? 15 : 2 + g % 13);
      const float m = 0.5f * static_cast<float>(g == 9 ? 15 : g == 3 ? 0 : 1 + g % 14);
      const float sc = 0.5f * static_cast<float>(g == 7 ? -32 : g % 2 == 0 ? -31 + g : 31 - g);
      for (int j = 0; j < 16; ++j) {
        const auto at = static_cast<std::size_t>(16 * g + j);
        const int q = j < 8 ? j : static_cast<int>(rng.below(8));
        w[at] = s * static_cast<float>(q % 4) - m;
        v[at] = sc * static_cast<float>(q - 4);
      }
    }
    EXPECT_EQ(dequantize(BlockType::q2_k, quantize({1, 256, BlockType::q2_k}, w, kernel)), w);
    EXPECT_EQ(dequantize(BlockType::q3_k, quantize({1, 256, BlockType::q3_k}, v, kernel)), v);
  }
}

TEST(GgufQuantize, SmallBlocksOfOddWeights) {
  for (const auto kernel : kBothKernels) {
    for (const BlockType type : {BlockType::q2_k, BlockType::q3_k}) {
      const auto back = [&](const std::vector<float>& w, const std::vector<float>& by = {}) {
        return dequantize(type, quantize({1, 256, type}, w, kernel, by));
      };
      // One weight among zeros is kept, at either end of a block, of either sign.
      for (const std::size_t at : {std::size_t{0}, std::size_t{255}}) {
        for (const float x : {3.0f, -3.0f}) {
          std::vector<float> w(256);
          w[at] = x;
          const auto y = back(w);
          for (std::size_t j = 0; j < 256; ++j) EXPECT_NEAR(y[j], w[j], 2e-3f) << j;
        }
      }
      // Constant blocks, one below the least number of f16, one above all that is held.
      EXPECT_EQ(back(std::vector<float>(256, -0.75f)), std::vector<float>(256, -0.75f));
      EXPECT_EQ(back(std::vector<float>(256, 0x1p-40f)), std::vector<float>(256, 0.0f));
      const float most = (type == BlockType::q2_k ? 15.0f : 64.0f) * 65504;
      for (const float v : back(std::vector<float>(256, -kInf))) EXPECT_NEAR(v / most, -1, 1e-3);
      for (const float v : back(std::vector<float>(256, kNan))) EXPECT_EQ(v, 0.0f);
      // Subnormal scales: the error is at most a few steps of 2^-24.
      std::vector<float> tiny = gaussian(256, 13);
      for (float& x : tiny) x *= 1e-4f;
      const auto y = back(tiny);
      for (std::size_t j = 0; j < 256; ++j) EXPECT_NEAR(y[j], tiny[j], 2.5e-6f) << j;
      // Weights without importance do not count: the rest of the group comes back exactly.
      std::vector<float> w(256, 3.1f), by(256, 0.0f);
      for (std::size_t j = 0; j < 256; j += 4) {
        w[j] = j % 8 == 0 ? -1.5f : 0.0f;
        by[j] = 1;
      }
      const auto z = back(w, by);
      for (std::size_t j = 0; j < 256; j += 4) EXPECT_NEAR(z[j], w[j], 1e-3f) << j;
    }
  }
}

TEST(GgufQuantize, ImportanceMovesTheError) {
  const auto w = gaussian(256 * 60, 9);
  std::vector<float> importance(256), ones(256, 1.0f), odd(256), zero(256);
  oracle::Rng rng(10);
  const float ignored[] = {kNan, kInf, -kInf, -1.0f, -0.0f};
  for (std::size_t j = 0; j < 256; ++j) {
    importance[j] = rng.chance(8) ? 100.0f : 0.5f;
    odd[j] = j % 3 == 0 ? ignored[j % 5] : importance[j];
    zero[j] = j % 3 == 0 ? 0.0f : importance[j];
  }
  for (const BlockType type : kSuper) {
    const GgufDesc d{60, 256, type};
    const auto plain = quantize(d, w), weighted = quantize(d, w, {}, importance);
    EXPECT_EQ(quantize(d, w, {}, ones), plain);
    EXPECT_EQ(quantize(d, w, {}, odd), quantize(d, w, {}, zero));
    const auto y = dequantize(type, plain), z = dequantize(type, weighted);
    EXPECT_LT(relative_error(w, z, importance), 0.8 * relative_error(w, y, importance));
    EXPECT_GT(relative_error(w, z), relative_error(w, y));
    for (const float v : dequantize(type, quantize(d, w, {}, std::vector<float>(256, 0.0f))))
      EXPECT_TRUE(std::isfinite(v));
  }
}

// A column that no input reaches may hold anything. The others are quantised as if it held 0.
TEST(GgufQuantize, WeightsWithoutImportanceCostNoPrecision) {
  auto w = gaussian(256 * 20, 14);
  std::vector<float> importance(256, 1.0f), without = w;
  for (std::size_t j = 3; j < 256; j += 7) importance[j] = 0;
  for (std::size_t i = 0; i < w.size(); ++i) {
    if (importance[i % 256] > 0) continue;
    w[i] *= i % 2 == 0 ? 10.0f : -1000.0f;
    without[i] = 0;
  }
  for (const BlockType type : kSuper) {
    const GgufDesc d{20, 256, type};
    const auto y = dequantize(type, quantize(d, w, {}, importance));
    const auto best = dequantize(type, quantize(d, without, {}, importance));
    EXPECT_LT(relative_error(w, y, importance), 1.02 * relative_error(w, best, importance))
        << static_cast<int>(type);
  }
}

// The grid of each group's own minimum and maximum.
Given minmax(const std::vector<float>& w, int last) {
  Given given;
  for (auto at = w.begin(); at != w.end(); at += 32) {
    const auto [low, high] = std::minmax_element(at, at + 32);
    given.scales.push_back((*high - *low) / static_cast<float>(last));
    given.biases.push_back(*low);
  }
  return given;
}

TEST(GgufQuantize, GivenGridsAreFitted) {
  const auto w = gaussian(256 * 60, 11);
  for (const BlockType type : {BlockType::q4_k, BlockType::q5_k}) {
    const int last = type == BlockType::q4_k ? 15 : 31;
    GgufDesc d{60, 256, type};
    const double searched = relative_error(w, dequantize(type, quantize(d, w)));
    d.given_grid = true;
    const Given given = minmax(w, last);
    const auto blocks = quantize(d, w, {}, {}, given);
    const double fitted = relative_error(w, dequantize(type, blocks));
    std::vector<float> own(w.size());
    for (std::size_t i = 0; i < w.size(); ++i) {
      const float s = given.scales[i / 32], b = given.biases[i / 32];
      own[i] = s * std::nearbyint((w[i] - b) / s) + b;
    }
    EXPECT_GT(fitted, searched);
    EXPECT_LT(fitted, 1.1 * relative_error(w, own));  // six bits of scale and minimum

    // A negative scale is the same grid from the other end.
    Given flipped = given;
    for (std::size_t g = 0; g < given.scales.size(); ++g) {
      flipped.biases[g] = given.biases[g] + static_cast<float>(last) * given.scales[g];
      flipped.scales[g] = -given.scales[g];
    }
    const double other = relative_error(w, dequantize(type, quantize(d, w, {}, {}, flipped)));
    EXPECT_NEAR(other / fitted, 1, 2e-3);

    // A bias above 0: from 0 to the same top.
    std::vector<float> positive(256);
    for (std::size_t j = 0; j < 256; ++j) positive[j] = 5 + static_cast<float>(j % 32) / 31;
    const auto y = dequantize(
        type, quantize({1, 256, type, DType::f32, true}, positive, {}, {}, minmax(positive, last)));
    for (std::size_t j = 0; j < 256; ++j)
      EXPECT_NEAR(y[j], positive[j], 3.6f / static_cast<float>(last));

    // What is not finite counts as 0.
    Given wild = given, none = given;
    wild.scales[3] = kNan, wild.biases[4] = -kInf;
    none.scales[3] = 0, none.biases[4] = 0;
    EXPECT_EQ(quantize(d, w, {}, {}, wild), quantize(d, w, {}, {}, none));
  }
}

TEST(GgufQuantize, SuperBlocksOfOddWeights) {
  for (const BlockType type : kSuper) {
    std::vector<float> w = gaussian(256, 12);
    w[0] = kNan;
    w[40] = kInf;
    w[100] = -kInf;
    const auto y = dequantize(type, quantize({1, 256, type}, w));
    for (const float v : y) EXPECT_TRUE(std::isfinite(v));
    const float most = type == BlockType::q2_k ? 9e5f : 3e6f;  // 15 and 63 times 65504
    EXPECT_GT(y[40], most);
    EXPECT_LT(y[100], -most);
    EXPECT_EQ(dequantize(type, quantize({1, 256, type}, std::vector<float>(256))),
              std::vector<float>(256));
    const auto constant =
        dequantize(type, quantize({1, 256, type}, std::vector<float>(256, -0.75f)));
    for (const float v : constant) EXPECT_NEAR(v, -0.75f, 4e-4f);
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
               "gguf_quantize: blocks: shape [2,18], expected [2,24] = [outer_size,bytes]");
  expect_error(
      with([](D d) {
        d.type = BlockType::iq4_xs;
        d.axis_size = 256;
      }),
      Code::unsupported,
      "gguf_quantize: type: IQ4_XS, expected Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K "
      "or Q6_K");
  expect_error(with([](D d) {
                 d.type = BlockType::q2_k;
                 d.axis_size = 256;
                 d.given_grid = true;
               }),
               Code::invalid_argument,
               "gguf_quantize: given_grid: true with type Q2_K, expected type Q4_K or Q5_K (or "
               "given_grid false)");
  expect_error(with([](D d) { d.given_grid = true; }), Code::invalid_argument,
               "gguf_quantize: given_grid: true with type Q4_0, expected type Q4_K or Q5_K (or "
               "given_grid false)");
  EXPECT_EQ(blocks, std::vector<std::uint8_t>(36, 7));
  expect_ok(with([](D) {}));

  const GgufDesc large{1, 256, BlockType::q4_k, DType::f32, true};
  const std::vector<float> weights(256), grid(8);
  std::vector<std::uint8_t> block(144);
  GgufQuantize::Args a;
  a.w = view(weights.data(), large.tensor_shape());
  a.scales = view(grid.data(), large.grid_shape());
  a.blocks = view(block.data(), large.block_shape());
  expect_error(run_op<GgufQuantize>(large, a), Code::invalid_argument,
               "gguf_quantize: biases: null, expected f32 [1,8]");
  a.biases = a.scales;
  a.importance = view(grid.data(), {8});
  expect_error(run_op<GgufQuantize>(large, a), Code::invalid_argument,
               "gguf_quantize: importance: shape [8], expected [256] = [axis_size]");
}

}  // namespace
}  // namespace bittern
