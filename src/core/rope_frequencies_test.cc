#include "bittern/rope_frequencies.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numbers>

#include "oracle/status_test.h"

namespace bittern {
namespace {

using oracle::expect_error;

// Python compares with transformers (tests/python/test_decoding.py).
TEST(RopeFrequencies, AreThePowersOfTheBase) {
  for (const std::int64_t dim : {0, 2, 64, 96, 128}) {
    for (const double base : {1e4, 5e5, 1e6}) {
      const auto made = rope_frequencies(dim, base);
      ASSERT_TRUE(made) << made.status().message();
      ASSERT_EQ(made->inverse.size(), static_cast<std::size_t>(dim / 2));
      EXPECT_EQ(made->factor, 1);
      for (std::size_t i = 0; i < made->inverse.size(); ++i) {
        const double exact =
            std::pow(base, -2.0 * static_cast<double>(i) / static_cast<double>(dim));
        EXPECT_EQ(made->inverse[i], static_cast<float>(exact)) << i;
      }
    }
  }
}

// Llama 3.1: base 500000, dim 128, factor 8, context 8192. Turns = 8192 inv / (2 pi).
TEST(RopeFrequencies, Llama3DividesWhatTurnsSlowly) {
  const auto plain = rope_frequencies(128, 5e5);
  const auto made = rope_frequencies(128, 5e5, {.kind = RopeScalingKind::llama3, .factor = 8});
  ASSERT_TRUE(plain && made);
  int between = 0;
  for (std::size_t i = 0; i < 64; ++i) {
    const double turns = 8192.0 * static_cast<double>(plain->inverse[i]) / (2 * std::numbers::pi);
    const float ratio = plain->inverse[i] / made->inverse[i];
    if (turns > 4.001) {
      EXPECT_EQ(ratio, 1) << i;
    } else if (turns < 0.999) {
      EXPECT_FLOAT_EQ(ratio, 8) << i;
    } else {
      EXPECT_GT(ratio, 1) << i;
      EXPECT_LT(ratio, 8) << i;
      ++between;
    }
  }
  EXPECT_GT(between, 3);
}

TEST(RopeFrequencies, YarnScalesAttention) {
  RopeScaling yarn{.kind = RopeScalingKind::yarn, .factor = 4, .original_context = 32768};
  auto made = rope_frequencies(128, 1e6, yarn);
  ASSERT_TRUE(made);
  EXPECT_DOUBLE_EQ(made->factor, 0.1 * std::log(4.0) + 1);
  EXPECT_EQ(made->inverse[0], 1);  // turns often: left as it is
  EXPECT_FLOAT_EQ(made->inverse[63], rope_frequencies(128, 1e6)->inverse[63] / 4);
  yarn.mscale = 1;
  yarn.mscale_all_dim = 0.5;
  EXPECT_DOUBLE_EQ(rope_frequencies(128, 1e6, yarn)->factor,
                   (0.1 * std::log(4.0) + 1) / (0.05 * std::log(4.0) + 1));
  yarn.attention_factor = 1.25;
  EXPECT_EQ(rope_frequencies(128, 1e6, yarn)->factor, 1.25);
}

TEST(RopeFrequencies, ErrorsNameWhatIsWrong) {
  const Code bad = Code::invalid_argument;
  const std::string name = "rope_frequencies: ";
  const auto status = [](const RopeScaling& s) { return rope_frequencies(8, 1e4, s).status(); };
  expect_error(rope_frequencies(-2, 1e4).status(), bad,
               name + "rotary_dim: -2, expected 0..1048576");
  expect_error(rope_frequencies(7, 1e4).status(), bad,
               name + "rotary_dim: 7, expected an even number");
  expect_error(rope_frequencies(8, 1).status(), bad,
               name + "base: 1, expected more than 1 and at most 1e30");
  expect_error(rope_frequencies(8, std::numeric_limits<double>::quiet_NaN()).status(), bad,
               name + "base: nan, expected more than 1 and at most 1e30");
  expect_error(status({.kind = RopeScalingKind::linear, .factor = 0}), bad,
               name + "factor: 0, expected 1e-30..1e30");
  expect_error(status({.kind = RopeScalingKind::yarn, .original_context = -1}), bad,
               name + "original_context: -1, expected 1e-30..1e30");
  expect_error(status({.kind = RopeScalingKind::llama3, .low_freq_factor = 4}), bad,
               name + "high_freq_factor: 4, expected more than low_freq_factor 4");
  expect_error(status({.kind = RopeScalingKind::yarn, .beta_fast = 0}), bad,
               name + "beta_fast: 0, expected 1e-30..1e30");
  expect_error(status({.kind = RopeScalingKind::yarn, .mscale = -1}), bad,
               name + "mscale: -1, expected 0..1e30");
  expect_error(status({.kind = static_cast<RopeScalingKind>(9)}), bad,
               name + "kind: 9, expected 0..3");
}

}  // namespace
}  // namespace bittern
