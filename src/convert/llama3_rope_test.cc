// Factors of llama3's rotary embedding come back as numbers that give the same factors.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "convert/model_config.h"

namespace bittern {
namespace {

// Small heads have few frequencies, so that low and high show in one of them, or in none.
TEST(Llama3Rope, NumbersAreFoundWhateverTheyAre) {
  std::mt19937 random(1);
  const auto uniform = [&](double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(random);
  };
  const auto one_of = [&](const std::vector<double>& list) { return list[random() % list.size()]; };
  const auto tenths = [](double x) { return std::round(x * 10) / 10; };
  int inexact = 0;
  for (int round = 0; round < 2000; ++round) {
    const auto dim = static_cast<std::int64_t>(one_of({8, 16, 32, 48, 64, 80, 96, 128}));
    RopeConfig rope;
    rope.type = "llama3";
    rope.theta = one_of({10000, 20000, 300000, 500000, 1e6});
    rope.factor = round % 2 == 0 ? one_of({2, 4, 8, 16, 32}) : tenths(uniform(1.5, 40));
    rope.low = round % 3 == 0 ? 1 : tenths(uniform(0.5, 4));
    rope.high = round % 3 == 0 ? 4 : tenths(rope.low + uniform(0.3, 8));
    rope.context = static_cast<std::int64_t>(one_of({64, 128, 1024, 4000, 4096, 5000, 8192}));
    const std::vector<float> factors = llama3_factors(rope, dim);
    // A file of llama.cpp's converter does not tell the context.
    const std::int64_t told = round % 5 == 0 ? 0 : rope.context;
    const auto longest = std::llround(double(rope.context) * rope.factor);
    RopeConfig found;
    found.theta = rope.theta;
    ASSERT_TRUE(solve_llama3(factors, told, longest, found))
        << "head of " << dim << ", theta " << rope.theta << ", factor " << rope.factor << ", low "
        << rope.low << ", high " << rope.high << ", context " << rope.context << ", told " << told;
    const std::vector<float> again = llama3_factors(found, dim);
    inexact += again != factors;
    for (std::size_t i = 0; i < factors.size(); ++i)
      ASSERT_NEAR(again[i], factors[i], 1e-5f * factors[i]);
  }
  EXPECT_LE(inexact, 2);
}

TEST(Llama3Rope, OtherFactorsAreRefused) {
  RopeConfig found;
  found.theta = 500000;
  EXPECT_FALSE(solve_llama3(std::vector<float>{1, 8, 1, 8, 1, 8, 1, 8}, 8192, 65536, found));
  EXPECT_FALSE(solve_llama3(std::vector<float>{8, 8, 4, 2, 1, 1, 1, 1}, 8192, 65536, found));
  EXPECT_FALSE(solve_llama3(std::vector<float>{1, 1, 0.5f, 0.25f}, 8192, 65536, found));
  const float nan = std::nanf("");
  EXPECT_FALSE(solve_llama3(std::vector<float>{1, nan, 8, 8}, 8192, 65536, found));
}

}  // namespace
}  // namespace bittern
