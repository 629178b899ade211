#include "bittern/sample.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <vector>

#include "oracle/status_test.h"

namespace bittern {
namespace {

using oracle::expect_error;

constexpr float kInf = std::numeric_limits<float>::infinity();

std::int32_t drawn(const std::vector<float>& logits, const SampleOptions& options,
                   std::uint64_t step = 0, const std::vector<std::int32_t>& history = {}) {
  const auto token = sample(logits, history, options, step);
  EXPECT_TRUE(token) << token.status().message();
  return token ? *token : -1;
}

// The tokens that 2000 steps draw.
std::map<std::int32_t, int> counts(const std::vector<float>& logits, const SampleOptions& options) {
  std::map<std::int32_t, int> found;
  for (std::uint64_t step = 0; step < 2000; ++step) ++found[drawn(logits, options, step)];
  return found;
}

TEST(Sample, GreedyTakesTheLowestIdAmongEqualLogits) {
  EXPECT_EQ(drawn({1, 3, 3, 2}, {.temperature = 0}), 1);
  EXPECT_EQ(drawn({-kInf, -5, -kInf}, {.temperature = 0}), 1);
  EXPECT_EQ(drawn({0.0f, -0.0f}, {.temperature = 0}), 0);
}

TEST(Sample, PenalisesEachTokenOfTheHistoryOnce) {
  const SampleOptions o{.temperature = 0, .repetition_penalty = 2};
  EXPECT_EQ(drawn({3, 2, 1}, o, 0, {0, 0, 0}), 1);     // 1.5, 2, 1
  EXPECT_EQ(drawn({3, 1.4f, 1}, o, 0, {0, 0, 0}), 0);  // 1.5 and not 0.375
  EXPECT_EQ(drawn({-1, -1.5f, -9}, o, 0, {0}), 1);     // -2, -1.5, -9
  EXPECT_EQ(drawn({3e38f, 1}, {.temperature = 0, .repetition_penalty = 1e-3}, 0, {0}), 0);
}

TEST(Sample, ProbabilitiesAreThoseOfTheSoftmax) {
  const std::vector<float> logits = {0, std::log(2.0f), std::log(5.0f), -kInf};
  for (const double temperature : {1.0, 0.5}) {
    const auto found = counts(logits, {.temperature = temperature, .seed = 3});
    EXPECT_EQ(found.size(), 3u);
    const double power = 1 / temperature;
    const double total = 1 + std::pow(2, power) + std::pow(5, power);
    for (const auto& [id, weight] : {std::pair{0, 1.0}, {1, 2.0}, {2, 5.0}}) {
      const double p = std::pow(weight, power) / total;
      EXPECT_NEAR(found.at(id), 2000 * p, 4 * std::sqrt(2000 * p * (1 - p))) << id;
    }
  }
}

TEST(Sample, FiltersKeepWhatTheirDefinitionsSay) {
  // Probabilities 0.4, 0.3, 0.2, 0.1, in another order.
  const std::vector<float> logits = {std::log(0.1f), std::log(0.4f), std::log(0.2f),
                                     std::log(0.3f)};
  const auto kept = [&](const SampleOptions& o) {
    std::vector<std::int32_t> ids;
    for (const auto& [id, count] : counts(logits, o)) ids.push_back(id);
    return ids;
  };
  using Ids = std::vector<std::int32_t>;
  EXPECT_EQ(kept({}), (Ids{0, 1, 2, 3}));
  EXPECT_EQ(kept({.top_k = 2}), (Ids{1, 3}));
  EXPECT_EQ(kept({.top_k = 9}), (Ids{0, 1, 2, 3}));
  EXPECT_EQ(kept({.top_p = 0.39}), (Ids{1}));
  EXPECT_EQ(kept({.top_p = 0.65}), (Ids{1, 3}));
  EXPECT_EQ(kept({.top_p = 0.75}), (Ids{1, 2, 3}));
  EXPECT_EQ(kept({.top_k = 2, .top_p = 0.5}), (Ids{1}));  // 0.4 of 0.7
  EXPECT_EQ(kept({.min_p = 0.6}), (Ids{1, 3}));
  EXPECT_EQ(kept({.min_p = 1}), (Ids{1}));
  EXPECT_EQ(kept({.temperature = 100, .top_p = 0.65}), (Ids{1, 3}));  // before the temperature
}

// Equal logits at the edge of top_k and top_p: the lower ids are kept.
TEST(Sample, TiesGoToTheLowerId) {
  const std::vector<float> equal(50, 1.0f);
  for (std::uint64_t step = 0; step < 200; ++step) {
    EXPECT_LT(drawn(equal, {.top_k = 7}, step), 7);
    EXPECT_LT(drawn(equal, {.top_p = 0.1}, step), 5);
  }
}

// A token depends on the seed and the step alone, not on what was drawn before. The first ones were
// computed by hand from SplitMix64.
TEST(Sample, IsACounterBasedGenerator) {
  const std::vector<float> equal(1000, 0.0f);
  const auto mix = [](std::uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  };
  constexpr std::uint64_t kG = 0x9E3779B97F4A7C15u;
  for (const std::uint64_t seed : {std::uint64_t{0}, std::uint64_t{7}, ~std::uint64_t{0}}) {
    for (const std::uint64_t step : {std::uint64_t{0}, std::uint64_t{1}, ~std::uint64_t{0}}) {
      const double u = static_cast<double>(mix(mix(seed + kG) + kG * (step + 1)) >> 11) * 0x1p-53;
      EXPECT_EQ(drawn(equal, {.seed = seed}, step), static_cast<std::int32_t>(1000 * u));
    }
  }
}

TEST(Sample, ErrorsNameWhatIsWrong) {
  const Code bad = Code::invalid_argument;
  const auto status = [](const std::vector<float>& logits, const SampleOptions& o,
                         const std::vector<std::int32_t>& history = {}) {
    return sample(logits, history, o, 0).status();
  };
  expect_error(status({}, {}), bad, "sample: logits: empty, expected at least one");
  expect_error(status({0, NAN}, {}), bad,
               "sample: logits: [1] is NaN, expected a number or -infinity");
  expect_error(status({kInf}, {.temperature = 0}), bad,
               "sample: logits: [0] is infinite, expected a number or -infinity");
  expect_error(status({-kInf, -kInf}, {}), bad,
               "sample: logits: all are -infinity, expected at least one number");
  expect_error(status({0}, {.temperature = -1}), bad,
               "sample: temperature: -1, expected 0 or 1e-30..1e30");
  expect_error(status({0}, {.top_k = -1}), bad, "sample: top_k: -1, expected at least 0");
  expect_error(status({0}, {.top_p = 0}), bad, "sample: top_p: 0, expected above 0 and at most 1");
  expect_error(status({0}, {.min_p = 1.5}), bad, "sample: min_p: 1.5, expected 0..1");
  expect_error(status({0}, {.repetition_penalty = 0}), bad,
               "sample: repetition_penalty: 0, expected 1e-30..1e30");
  expect_error(status({0}, {}, {1}), bad, "sample: history: 1, expected 0..0");
  expect_error(status({0}, {}, {-1}), bad, "sample: history: -1, expected 0..0");
}

}  // namespace
}  // namespace bittern
