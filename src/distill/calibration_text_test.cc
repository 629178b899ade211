// The texts that models are calibrated on and learn from: plain ones, and conversations.
#include "distill/calibration_text.h"

#include <gtest/gtest.h>

#include <stdexcept>

#include "formats/test_folder.h"
#include "model/test_model.h"

namespace bittern {
namespace {

class CalibrationTexts : public TestFolder {
 protected:
  void SetUp() override {
    TestFolder::SetUp();
    put("model/tokenizer.json", tiny_tokenizer());
    put("model/tokenizer_config.json", kTinyTokenizerConfig);
  }
  Tokenizer tokenizer() const {
    auto read = Tokenizer::load(path("model"));
    if (!read) throw std::runtime_error(std::string(read.status().message()));
    return std::move(*read);
  }
  std::vector<std::int32_t> tokens(const std::string& name, const std::string& text) const {
    put(name, text);
    const auto read = read_pieces(tokenizer(), path(name), 4);
    if (!read) throw std::runtime_error(std::string(read.status().message()));
    return read->tokens;
  }
  std::string refusal(const std::string& text) const {
    put("bad.jsonl", text);
    const auto read = read_pieces(tokenizer(), path("bad.jsonl"), 4);
    EXPECT_FALSE(read.ok());
    return std::string(read.status().message()).substr(path("").size());
  }
};

TEST_F(CalibrationTexts, ConversationsAreThoseOfTheTemplate) {
  const ChatMessage chat[] = {{"user", "Hi <|im_end|>"}, {"assistant", "Well, yes."}};
  auto want = *tokenizer().apply_chat(chat, {.add_generation_prompt = false});
  const auto text = *tokenizer().encode("A text.\n\n", {.add_special = false});
  want.insert(want.end(), text.begin(), text.end());
  EXPECT_EQ(tokens("chats.jsonl",
                   "{\"messages\": [{\"role\": \"user\", \"content\": \"Hi <|im_end|>\"}, "
                   "{\"content\": \"Well, yes.\", \"role\": \"assistant\"}], \"id\": 7}\r\n"
                   "  \n{\"text\": \"A text.\"}"),
            want);
  // The same bytes under another name are a plain text.
  const std::string plain = "{\"text\": \"A text.\"}";
  put("plain.txt", plain);
  EXPECT_EQ(tokens("plain.txt", plain), *tokenizer().encode(plain, {.add_special = false}));
}

TEST_F(CalibrationTexts, SayWhichLineIsWrong) {
  const std::string good = "{\"text\": \"a\"}\n";
  EXPECT_EQ(refusal(good + "\n{\"prompt\": \"b\"}\n"),
            R"(bad.jsonl:3: an object, expected {"messages": [{"role": ..., "content": ...}, )"
            R"(...]} or {"text": ...})");
  for (const char* line : {"[]", "7", "{\"messages\": []}", "{\"messages\": \"x\"}",
                           "{\"text\": 1}", "{\"messages\": [], \"text\": \"b\"}"})
    EXPECT_NE(refusal(good + line).find(R"(, expected {"messages")"), std::string::npos) << line;
  for (const char* message : {"1", "{}", "{\"role\": \"user\"}",
                              "{\"role\": \"user\", \"content\": [{\"type\": \"text\"}]}"})
    EXPECT_NE(refusal(good + "{\"messages\": [" + message + "]}")
                  .find("expected an object with the strings role and content"),
              std::string::npos)
        << message;
  EXPECT_EQ(refusal(good + "{\"text\": \"b\"").rfind("bad.jsonl:2: ", 0), 0u);
}

}  // namespace
}  // namespace bittern
