// Texts that models write themselves.
#include "distill/self_text.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <stdexcept>

#include "bittern/sample.h"
#include "core/split_mix.h"
#include "formats/test_folder.h"
#include "model/test_model.h"

namespace bittern {
namespace {

class SelfText : public TestFolder {
 protected:
  static Status ignore(double) { return {}; }

  CalibrationText written(const std::string& name, std::int64_t pieces, std::uint64_t seed) const {
    const std::string folder = put_tiny_model(*this, name);
    const auto model = Model::load(folder);
    const auto tokenizer = Tokenizer::load(folder);
    if (!model) throw std::runtime_error(std::string(model.status().message()));
    auto text = write_text(*model, *tokenizer, pieces, 12, seed, ignore);
    if (!text) throw std::runtime_error(std::string(text.status().message()));
    return std::move(*text);
  }
};

TEST_F(SelfText, IsDrawnFromThePredictions) {
  const CalibrationText text = written("llama", 2, 7);
  const auto model = Model::load(path("llama"));
  const std::int64_t vocab = model->info().vocab;
  const auto tokenizer = Tokenizer::load(path("llama"));
  const auto tokens = static_cast<std::size_t>(tokenizer->size());
  ASSERT_LT(tokenizer->size(), vocab);  // ids behind the last token are never drawn
  for (std::int64_t i = 0; i < 2; ++i) {
    const std::int32_t* const piece = text.piece(i);
    EXPECT_EQ(piece[0], 1);  // <|im_end|>: the tiny models have no bos
    auto session = Session::make(*model, {.context = 12});
    std::vector<float> logits(static_cast<std::size_t>(vocab));
    for (std::int64_t t = 0; t + 1 < 12; ++t) {
      ASSERT_TRUE(session->append({piece + t, 1}, view(logits.data(), {1, vocab})).ok());
      const std::uint64_t seed = split_mix(7 + kGolden * static_cast<std::uint64_t>(i));
      const std::span<const float> known(logits.data(), tokens);
      EXPECT_EQ(*sample(known, {}, {.seed = seed}, static_cast<std::uint64_t>(t)), piece[t + 1]);
      EXPECT_TRUE(tokenizer->decode({piece + t + 1, 1}).ok());
    }
  }
}

TEST_F(SelfText, PiecesAndSeedsDiffer) {
  // 33 are one more than are written together.
  for (const auto& [name, pieces] : {std::pair{"llama", 33}, {"qwen3_next", 3}}) {
    const CalibrationText text = written(name, pieces, 1);
    ASSERT_EQ(text.pieces(), pieces);
    std::set<std::vector<std::int32_t>> seen;
    for (std::int64_t i = 0; i < pieces; ++i) seen.emplace(text.piece(i), text.piece(i) + 12);
    EXPECT_EQ(seen.size(), static_cast<std::size_t>(pieces));
    EXPECT_NE(written(name, pieces, 2).tokens, text.tokens);
    // A piece does not depend on how many there are.
    EXPECT_TRUE(std::equal(text.piece(0), text.piece(2), written(name, 2, 1).piece(0)));
  }
}

TEST_F(SelfText, Ends) {
  const std::string folder = put_tiny_model(*this, "llama");
  const auto model = Model::load(folder);
  const auto text = write_text(*model, *Tokenizer::load(folder), 4, 12, 0, [](double share) {
    EXPECT_GT(share, 0);
    EXPECT_LT(share, 1);
    return share > 0.3 ? Status(Code::cancelled, "enough") : Status();
  });
  EXPECT_EQ(text.status().code(), Code::cancelled);
  put("bare/tokenizer.json", tiny_tokenizer());
  const auto without = write_text(*model, *Tokenizer::load(path("bare")), 1, 12, 0, ignore);
  EXPECT_EQ(without.status().message(),
            "the model has neither a bos nor an eos token to begin a text with, expected @{data}");
}

}  // namespace
}  // namespace bittern
