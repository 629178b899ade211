#include "convert/target.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

namespace bittern {
namespace {

using Choices = std::vector<std::vector<SizedLoss>>;
using Chosen = std::vector<std::size_t>;

SizedLoss sum(const Choices& choices, const Chosen& chosen) {
  SizedLoss all;
  for (std::size_t t = 0; t < choices.size(); ++t) {
    all.bytes += choices[t][chosen[t]].bytes;
    all.loss += choices[t][chosen[t]].loss;
  }
  return all;
}

// Every answer there is, the smallest first.
std::vector<SizedLoss> all_answers(const Choices& choices) {
  std::vector<SizedLoss> all{{}};
  for (const std::vector<SizedLoss>& tensor : choices) {
    std::vector<SizedLoss> longer;
    for (const SizedLoss& a : all)
      for (const SizedLoss& b : tensor) longer.push_back({a.bytes + b.bytes, a.loss + b.loss});
    all = std::move(longer);
  }
  std::sort(all.begin(), all.end(),
            [](const SizedLoss& a, const SizedLoss& b) { return a.bytes < b.bytes; });
  return all;
}

// Tensors of very different sizes, losses that mostly fall by a factor of four a bit, and some that
// do not: a type that is larger and no better, one that loses nothing, one that cannot hold it.
Choices random_choices(std::mt19937& random) {
  std::uniform_int_distribution<int> tensors(1, 6), kind(0, 5);
  std::uniform_real_distribution<double> uniform(0.2, 1.8);
  Choices choices(static_cast<std::size_t>(tensors(random)));
  for (std::vector<SizedLoss>& tensor : choices) {
    const auto weights = static_cast<std::uint64_t>(std::exp2(4 + 6 * uniform(random)));
    double loss = uniform(random) * static_cast<double>(weights);
    for (const std::uint64_t bits : {2, 3, 4, 5, 6, 8}) {
      tensor.push_back({weights * bits + weights / 2, loss});
      loss *= kind(random) == 0 ? 1.1 : 0.25 * uniform(random);
    }
    if (kind(random) == 0) tensor[3].loss = 0;
    if (kind(random) == 0) tensor[1].loss = std::numeric_limits<double>::infinity();
  }
  return choices;
}

TEST(ChooseWithin, IsMonotoneNeverLosesToUniformAndIsNearTheOptimum) {
  std::mt19937 random(7);
  double excess = 0;
  int answers = 0;
  for (int round = 0; round < 60; ++round) {
    const Choices choices = random_choices(random);
    std::vector<Chosen> uniform;
    for (std::size_t c = 0; c < choices[0].size(); ++c)
      uniform.push_back(Chosen(choices.size(), c));
    const std::vector<SizedLoss> all = all_answers(choices);
    double optimum = std::numeric_limits<double>::infinity(), before = optimum;
    std::uint64_t last = 0;
    for (std::size_t i = 0; i < all.size(); ++i) {
      optimum = std::min(optimum, all[i].loss);
      if (!std::isfinite(optimum) || all[i].bytes == last || (i % 7 != 0 && i + 1 != all.size()))
        continue;
      last = all[i].bytes;
      for (std::size_t j = i + 1; j < all.size() && all[j].bytes == last; ++j)
        optimum = std::min(optimum, all[j].loss);
      const Chosen chosen = choose_within(choices, uniform, last);
      ASSERT_EQ(chosen.size(), choices.size());
      const SizedLoss got = sum(choices, chosen);
      ASSERT_LE(got.bytes, last);
      ASSERT_LE(got.loss, before * (1 + 1e-12));
      ASSERT_GE(got.loss, optimum * (1 - 1e-12));
      for (const Chosen& same : uniform) {
        const SizedLoss one = sum(choices, same);
        if (one.bytes <= last) {
          ASSERT_LE(got.loss, one.loss * (1 + 1e-12));
        }
      }
      before = got.loss;
      if (optimum > 0) {
        excess += got.loss / optimum - 1;
        ++answers;
      }
    }
    // With room for everything, nothing is lost that need not be.
    const SizedLoss most = sum(choices, choose_within(choices, uniform, 1 << 30));
    EXPECT_NEAR(most.loss, optimum, 1e-12 * optimum);
  }
  EXPECT_GT(answers, 10000);
  EXPECT_LT(excess / answers, 0.2);
}

TEST(ChooseWithin, FillsWhatAStepTooLargeLeaves) {
  // The large tensor gains most per byte but its step does not fit; the small ones take the room.
  const Choices choices{{{100, 1000}, {200, 0}}, {{10, 50}, {20, 10}}, {{10, 40}, {20, 10}}};
  EXPECT_EQ(choose_within(choices, {}, 120), (Chosen{0, 0, 0}));
  EXPECT_EQ(choose_within(choices, {}, 130), (Chosen{0, 1, 0}));
  EXPECT_EQ(choose_within(choices, {}, 219), (Chosen{0, 1, 1}));
  EXPECT_EQ(choose_within(choices, {}, 220), (Chosen{1, 0, 0}));
  EXPECT_EQ(choose_within(choices, {}, 240), (Chosen{1, 1, 1}));
}

}  // namespace
}  // namespace bittern
