// Text from a model, what sessions refuse, and what is wrong with a model's files.
#include "bittern/generate.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "formats/test_folder.h"
#include "model/test_model.h"

namespace bittern {
namespace {

class Generate : public TestFolder {
 protected:
  void SetUp() override {
    path_ = put_tiny_model(*this, "llama");
    model_.emplace(*Model::load(path_));
    tokenizer_.emplace(*Tokenizer::load(path_));
  }

  Session session(std::int64_t context = 0) const {
    return std::move(*Session::make(*model_, {.context = context}));
  }
  struct Made {
    std::string text;
    std::vector<std::int32_t> tokens;
    GenerateEnd end = GenerateEnd::none;
    Status status;
  };
  // All that comes; the pieces are put together.
  static Made all(Session& session, const Tokenizer* tokenizer,
                  std::span<const std::int32_t> prompt, const GenerateOptions& options) {
    Made made;
    auto generator = Generator::start(session, tokenizer, prompt, options);
    made.status = generator.status();
    if (!generator) return made;
    while (true) {
      const auto piece = generator->next();
      made.status = piece.status();
      if (!piece || !*piece) break;
      made.text += (*piece)->text;
      if ((*piece)->token >= 0) made.tokens.push_back((*piece)->token);
    }
    made.end = generator->end();
    EXPECT_EQ(generator->tokens(), std::ssize(made.tokens));
    return made;
  }
  Made all(const GenerateOptions& options, std::int64_t context = 0) {
    Session s = session(context);
    return all(s, &*tokenizer_, prompt_, options);
  }

  const std::vector<std::int32_t> prompt_ = {10, 20, 30};
  std::string path_;
  std::optional<Model> model_;
  std::optional<Tokenizer> tokenizer_;
};

TEST_F(Generate, IsTheLoopOfSamplesAndAppends) {
  const GenerateOptions options{.sample = {.temperature = 1.3, .top_k = 30, .seed = 7},
                                .max_tokens = 25,
                                .ignore_ends = true};
  const Made made = all(options);
  EXPECT_EQ(made.end, GenerateEnd::max_tokens);
  ASSERT_EQ(made.tokens.size(), 25u);
  TokenStream stream(*tokenizer_);
  std::string text;
  for (const std::int32_t token : made.tokens) text += *stream.push(token);
  EXPECT_EQ(made.text, text + stream.finish());

  Session s = session();
  std::vector<float> logits(static_cast<std::size_t>(model_->info().vocab));
  const MutView last = view(logits.data(), {1, model_->info().vocab});
  ASSERT_TRUE(s.append(prompt_, last).ok());
  std::vector<std::int32_t> tokens;
  for (std::uint64_t step = 0; step < 25; ++step) {
    for (std::size_t i = static_cast<std::size_t>(tokenizer_->size()); i < logits.size(); ++i)
      logits[i] = -std::numeric_limits<float>::infinity();
    tokens.push_back(*sample(logits, s.tokens(), options.sample, step));
    ASSERT_TRUE(s.append(std::span(&tokens.back(), 1), last).ok());
  }
  EXPECT_EQ(made.tokens, tokens);
}

TEST_F(Generate, DrawsNoTokenThatTheTokeniserDoesNotKnow) {
  ASSERT_LT(tokenizer_->size(), model_->info().vocab);
  const GenerateOptions hot{.sample = {.temperature = 1e3}, .max_tokens = 100, .ignore_ends = true};
  for (const std::int32_t token : all(hot).tokens) EXPECT_LT(token, tokenizer_->size());
  // A prompt may hold one all the same, and be penalised.
  const std::int32_t unknown[] = {10, 95};
  Session s = session();
  const Made made =
      all(s, &*tokenizer_, unknown,
          {.sample = {.repetition_penalty = 2}, .max_tokens = 3, .ignore_ends = true});
  EXPECT_TRUE(made.status.ok()) << made.status.message();
  // Without a tokeniser all of them are drawn.
  Session other = session();
  const Made ids = all(other, nullptr, prompt_, hot);
  EXPECT_TRUE(std::any_of(ids.tokens.begin(), ids.tokens.end(),
                          [&](std::int32_t id) { return id >= tokenizer_->size(); }));
  EXPECT_EQ(ids.text, "");
}

TEST_F(Generate, EndsBeforeAStop) {
  const GenerateOptions free{.sample = {.seed = 3}, .max_tokens = 40, .ignore_ends = true};
  const std::string text = all(free).text;
  ASSERT_GT(text.size(), 20u);
  for (std::size_t first = 0; first + 3 <= text.size(); ++first) {
    for (const std::size_t size : {std::size_t{1}, std::size_t{3}}) {
      GenerateOptions options = free;
      const std::string stop = text.substr(first, size);
      options.stops = {"never to be seen", stop, stop + "x"};
      const Made made = all(options);
      EXPECT_EQ(made.text, text.substr(0, text.find(stop)));
      EXPECT_EQ(made.end, GenerateEnd::stop);
    }
  }
  // What may begin a stop is held back, and comes at the end.
  GenerateOptions options = free;
  options.stops = {text.substr(text.size() - 2) + "and more"};
  EXPECT_EQ(all(options).text, text);
}

TEST_F(Generate, EndsWithATokenThatEndsAnswers) {
  // The likeliest of all, wherever it stands.
  GenerateOptions options{.sample = {.temperature = 0}, .max_tokens = 100};
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    options.sample = {.temperature = 2, .seed = seed};
    options.ignore_ends = false;
    const Made short_one = all(options);
    options.ignore_ends = true;
    const Made long_one = all(options);
    EXPECT_EQ(long_one.tokens.size(), 100u);
    const auto ends = tokenizer_->ends();
    const auto first = std::find_first_of(long_one.tokens.begin(), long_one.tokens.end(),
                                          ends.begin(), ends.end());
    EXPECT_EQ(short_one.tokens, std::vector(long_one.tokens.begin(), first));
    EXPECT_EQ(short_one.end,
              first == long_one.tokens.end() ? GenerateEnd::max_tokens : GenerateEnd::token);
  }
}

TEST_F(Generate, EndsWhereTheContextIsFull) {
  for (const std::int64_t context : {4, 5, 9}) {
    Session s = session(context);
    const Made made = all(s, &*tokenizer_, prompt_, {.ignore_ends = true});
    EXPECT_EQ(made.end, GenerateEnd::context);
    EXPECT_EQ(std::ssize(made.tokens), context - 3);
    EXPECT_EQ(s.size(), context - 1);  // the last token is not appended
  }
}

TEST_F(Generate, FinishGivesWhatWasHeldBack) {
  Session s = session();
  const GenerateOptions options{.sample = {.seed = 3}, .ignore_ends = true};
  const std::string text = all({.sample = {.seed = 3}, .max_tokens = 8, .ignore_ends = true}).text;
  GenerateOptions held = options;
  held.stops = {text + "."};
  auto generator = Generator::start(s, &*tokenizer_, prompt_, held);
  ASSERT_TRUE(generator.ok());
  for (int i = 0; i < 8; ++i) EXPECT_EQ((*generator->next())->text, "");
  generator->finish();
  const auto rest = generator->next();
  ASSERT_TRUE(rest.ok() && *rest);
  EXPECT_EQ((*rest)->text, text);
  EXPECT_EQ((*rest)->token, -1);
  EXPECT_FALSE(*generator->next());
  EXPECT_EQ(generator->tokens(), 8);
}

TEST_F(Generate, GoesOnFromTheStepAndTheTokens) {
  const GenerateOptions options{
      .sample = {.temperature = 1.5}, .max_tokens = 20, .ignore_ends = true};
  const Made whole = all(options);
  Session s = session();
  GenerateOptions first = options;
  first.max_tokens = 9;
  const Made start = all(s, &*tokenizer_, prompt_, first);
  GenerateOptions second = options;
  second.max_tokens = 11;
  second.step = 9;
  const Made rest = all(s, &*tokenizer_, std::span(&start.tokens.back(), 1), second);
  std::vector<std::int32_t> both = start.tokens;
  both.insert(both.end(), rest.tokens.begin(), rest.tokens.end());
  EXPECT_EQ(both, whole.tokens);
}

TEST_F(Generate, RefusesBeforeItAppends) {
  const auto refused = [&](const GenerateOptions& options, const std::string& text,
                           std::span<const std::int32_t> prompt, const Tokenizer* tokenizer) {
    Session s = session(10);
    const auto made = Generator::start(s, tokenizer, prompt, options);
    EXPECT_EQ(made.status().code(), Code::invalid_argument);
    EXPECT_EQ(made.status().message(), text);
    EXPECT_EQ(s.size(), 0);
  };
  const Tokenizer* const t = &*tokenizer_;
  refused({.sample = {.temperature = -1}}, "sample: temperature: -1, expected 0 or 1e-30..1e30",
          prompt_, t);
  refused({.max_tokens = -2}, "generate: max_tokens: -2, expected -1 or more", prompt_, t);
  refused({.stops = {""}}, "generate: stops: an empty text, expected others", prompt_, t);
  refused({.stops = {"x"}},
          "generate: stops: without a tokeniser there is no text that they could end", prompt_,
          nullptr);
  refused({}, "generate: prompt: no tokens, expected at least one", {}, t);
  const std::vector<std::int32_t> full(10, 5), wrong = {5, 96}, negative = {-1};
  refused({}, "generate: prompt: 10 tokens, which leave no room for an answer in a context of 10",
          full, t);
  refused({}, "tokens: 96 at 1, expected 0 to 95", wrong, t);
  refused({}, "tokens: -1 at 0, expected 0 to 95", negative, t);
}

TEST_F(Generate, AWatcherCancelsThePrompt) {
  struct Never : Watcher {
    bool go_on() override { return false; }
  } never;
  Session s = session();
  ASSERT_TRUE(s.append(prompt_).ok());
  const auto made = Generator::start(s, nullptr, prompt_, {}, &never);
  EXPECT_EQ(made.status().code(), Code::cancelled);
  EXPECT_EQ(s.size(), 3);
  EXPECT_TRUE(Generator::start(s, nullptr, prompt_).ok());
}

TEST_F(Generate, AVocabularyThatDoesNotFitTheEmbedding) {
  std::string words = tiny_tokenizer();
  words.replace(words.find("],\"normalizer\""), 1,
                R"(,{"id":96,"content":"<more>","special":true}])");
  put("llama/tokenizer.json", words);
  const auto tokenizer = Tokenizer::load(path_);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  EXPECT_EQ(
      check_vocabulary(model_->info(), *tokenizer).message(),
      "tokeniser: 97 tokens, but the model has embeddings of 96, expected one for each token");
  Session s = session();
  EXPECT_EQ(Generator::start(s, &*tokenizer, prompt_).status().code(), Code::invalid_argument);
}

// ---- sessions ----

TEST_F(Generate, AFullSessionRefusesAndStaysAsItWas) {
  Session s = session(4);
  ASSERT_TRUE(s.append(prompt_).ok());
  const std::int32_t two[] = {1, 2};
  EXPECT_EQ(s.append(two).message(),
            "tokens: 2 more than the 3 of a session with a context of 4, expected at most 1");
  EXPECT_EQ(s.size(), 3);
  EXPECT_TRUE(s.append(std::span(two, 1)).ok());
}

TEST_F(Generate, LookTellsWhatLoadTells) {
  const auto info = Model::look(path_);
  ASSERT_TRUE(info.ok()) << info.status().message();
  EXPECT_EQ(info->architecture, "llama");
  EXPECT_EQ(info->vocab, 96);
  EXPECT_EQ(info->context, 128);
  EXPECT_EQ(info->parameters, model_->info().parameters);
  EXPECT_EQ(info->weight_bytes, model_->info().weight_bytes);
  EXPECT_EQ(Model::look(path("none")).status().message(),
            Model::load(path("none")).status().message());
}

// ---- what is wrong with files ----

class Broken : public Generate {
 protected:
  // Model::load of the folder with `from` replaced in its config.
  Status with(const std::string& from, const std::string& to) {
    std::string config = text_of("llama/config.json");
    EXPECT_NE(config.find(from), config.npos) << from;
    config.replace(config.find(from), from.size(), to);
    put("llama/config.json", config);
    const Status status = Model::load(path_).status();
    EXPECT_EQ(Model::look(path_).status().message(), status.message());
    put_tiny_model(*this, "llama");
    EXPECT_EQ(status.message().find('\n'), std::string_view::npos);
    EXPECT_TRUE(status.ok() || status.message().starts_with(path_)) << status.message();
    return status;
  }
};

TEST_F(Broken, AConfigThatContradictsTheTensors) {
  for (const auto& [from, to] :
       {std::pair("\"vocab_size\": 96", "\"vocab_size\": 95"),
        std::pair("\"vocab_size\": 96", "\"vocab_size\": 97"),
        std::pair("\"hidden_size\": 64", "\"hidden_size\": 32"),
        std::pair("\"intermediate_size\": 96", "\"intermediate_size\": 97"),
        std::pair("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3"),
        std::pair("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1"),
        std::pair("\"num_attention_heads\": 4", "\"num_attention_heads\": 8"),
        std::pair("\"num_key_value_heads\": 2", "\"num_key_value_heads\": 4"),
        std::pair("\"num_key_value_heads\": 2", "\"num_key_value_heads\": 3"),
        std::pair("\"head_dim\": 16", "\"head_dim\": 8"),
        std::pair("\"attention_bias\": false", "\"attention_bias\": true"),
        std::pair("\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false"),
        std::pair("\"vocab_size\": 96", "\"vocab_size\": 9223372036854775807"),
        std::pair("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 4611686018427387904"),
        std::pair("\"head_dim\": 16", "\"head_dim\": 0"),
        std::pair("\"num_attention_heads\": 4", "\"num_attention_heads\": -4"),
        std::pair("\"rms_norm_eps\": 1e-06", "\"rms_norm_eps\": -1"),
        std::pair("\"max_position_embeddings\": 128", "\"max_position_embeddings\": -1")}) {
    SCOPED_TRACE(to);
    const Status status = with(from, to);
    EXPECT_TRUE(status.code() == Code::invalid_argument || status.code() == Code::unsupported)
        << status.message();
  }
}

TEST_F(Broken, AnArchitectureThatIsNotKnownIsNamed) {
  const Status status = with("\"model_type\": \"llama\"", "\"model_type\": \"mamba9\"");
  EXPECT_EQ(status.code(), Code::unsupported);
  EXPECT_NE(status.message().find("mamba9"), std::string_view::npos) << status.message();
}

TEST_F(Broken, NanInWeightsReachesTheLogitsAndIsNotDrawnFrom) {
  // One in the embedding of token 50: texts without it never meet it.
  std::vector<StoredTensor> tensors;
  const auto file = SafetensorsFile::open(path("llama/model.safetensors"));
  ASSERT_TRUE(file.ok());
  for (const auto& tensor : file->tensors()) {
    const auto data = file->bytes(tensor);
    tensors.push_back({{tensor.name, tensor.dtype, tensor.shape},
                       std::string(reinterpret_cast<const char*>(data.data()), data.size())});
    if (tensor.name == "model.embed_tokens.weight") {
      const std::uint16_t nan = 0x7fc0;
      std::memcpy(tensors.back().bytes.data() + 50 * 64 * 2, &nan, 2);
    }
  }
  put_tensors("nan/model.safetensors", tensors, {{"format", "pt"}});
  put("nan/config.json", text_of("llama/config.json"));
  const auto model = Model::load(path("nan"));
  ASSERT_TRUE(model.ok()) << model.status().message();
  auto s = Session::make(*model);
  std::vector<float> logits(96);
  ASSERT_TRUE(s->append(prompt_, view(logits.data(), {1, 96})).ok());
  for (std::size_t i = 0; i < 96; ++i) EXPECT_EQ(std::isnan(logits[i]), i == 50);  // it is tied
  const Made made = all(*s, nullptr, prompt_, {});
  EXPECT_EQ(made.status.code(), Code::invalid_argument);
  EXPECT_EQ(made.status.message(),
            "generate: the model's logits are not all numbers after 6 tokens; are its weights "
            "whole?");
  const std::int32_t it = 50;
  ASSERT_TRUE(s->append(std::span(&it, 1), view(logits.data(), {1, 96})).ok());
  for (const float logit : logits) EXPECT_TRUE(std::isnan(logit));
}

}  // namespace
}  // namespace bittern
