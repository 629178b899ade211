// The sums of a layer's inputs: made together or in several rounds, and each place with the weights
// of its own rows.
#include "distill/layer_inputs.h"

#include <gtest/gtest.h>

#include <set>
#include <stdexcept>
#include <string>

#include "distill/token_weights.h"
#include "formats/test_folder.h"
#include "model/test_model.h"

namespace bittern {
namespace {

constexpr std::int64_t kContext = 16, kPieces = 3;

class LayerInputsTest : public TestFolder {
 protected:
  static Status nothing() { return {}; }

  Model tiny(const char* name) {
    auto model =
        Model::load(put_tiny_model(*this, name), {.activations = Activations::exact, .threads = 1});
    if (!model) throw std::runtime_error(std::string(model.status().message()));
    return std::move(*model);
  }
  static CalibrationText text(const Model& model) {
    CalibrationText text{.context = kContext, .tokens = {}};
    for (std::int64_t i = 0; i < kPieces * kContext; ++i)
      text.tokens.push_back(static_cast<std::int32_t>((7 * i + i * i) % model.info().vocab));
    return text;
  }
  // All places that a layer of a model with experts may have.
  static std::set<InputPlace> places(std::int64_t layer) {
    std::set<InputPlace> all;
    for (const ProductPlace place : {ProductPlace::mixer_in, ProductPlace::mixer_out,
                                     ProductPlace::mlp_in, ProductPlace::mlp_down}) {
      all.insert({layer, place});
      all.insert({layer, place, true});
      for (std::int64_t expert = 0; expert < 8; ++expert) all.insert({layer, place, false, expert});
    }
    return all;
  }
  static void expect_same(const Gram& a, const Gram& b) {
    ASSERT_EQ(a.inputs(), b.inputs());
    EXPECT_EQ(a.rows(), b.rows());
    for (std::int64_t i = 0; i < a.inputs(); ++i)
      for (std::int64_t j = i; j < a.inputs(); ++j)
        ASSERT_EQ(a.sums().row(i)[j], b.sums().row(i)[j]) << i << " " << j;
  }
};

TEST_F(LayerInputsTest, RoundsGiveTheSameSums) {
  const Model model = tiny("qwen2_moe");
  const CalibrationText all = text(model);
  auto together = LayerInputs::make(model, all), apart = LayerInputs::make(model, all);
  ASSERT_TRUE(together && apart);
  for (std::int64_t layer = 0; layer < model.info().layers; ++layer) {
    auto sums = together->next(places(layer), false, nothing);
    ASSERT_TRUE(sums) << sums.status().message();
    std::uint64_t expert_rows = 0;
    for (const auto& [place, gram] : *sums) {
      auto one = apart->next({place}, true, nothing);
      ASSERT_TRUE(one);
      ASSERT_EQ(one->size(), 1u);
      expect_same(one->at(place), gram);
      if (place.expert >= 0 && place.place == ProductPlace::mlp_in) expert_rows += gram.rows();
      if (place.expert < 0) {
        EXPECT_EQ(gram.rows(), std::uint64_t{kPieces * kContext});
      }
    }
    // Each token goes to two experts; and all have a down projection, the shared one too.
    EXPECT_EQ(expert_rows, std::uint64_t{2 * kPieces * kContext});
    EXPECT_TRUE(sums->contains({layer, ProductPlace::mlp_down, true}));
    EXPECT_FALSE(sums->contains({layer, ProductPlace::mlp_in, true}));
    ASSERT_TRUE(apart->next({}, false, nothing));
  }
}

// Weights are there for every place whose rows are multiplied, one for each row: those of experts
// are fewer than the tokens. Each has the mean 1, or less where one was cut off.
TEST_F(LayerInputsTest, EveryRowHasItsWeight) {
  const Model model = tiny("qwen2_moe");
  const CalibrationText all = text(model);
  const auto weights = TokenWeights::make(model, all, nullptr, nothing);
  ASSERT_TRUE(weights) << weights.status().message();
  auto inputs = LayerInputs::make(model, all);
  ASSERT_TRUE(inputs);
  for (std::int64_t layer = 0; layer < model.info().layers; ++layer) {
    const auto sums = inputs->next(places(layer), false, nothing);
    ASSERT_TRUE(sums);
    for (const auto& [place, gram] : *sums) {
      double sum = 0;
      std::uint64_t rows = 0;
      for (std::int64_t piece = 0; piece < kPieces; ++piece)
        for (const float weight : weights->of(place, piece, 0, kContext)) {
          sum += double{weight};
          ++rows;
        }
      EXPECT_EQ(rows, gram.rows());
      EXPECT_LT(sum / static_cast<double>(rows), 1.00001);
      EXPECT_GT(sum, 0);
    }
  }
}

}  // namespace
}  // namespace bittern
