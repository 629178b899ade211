// Text to tokens and back, as the model's own tokeniser does it, and conversations to tokens.
//
//   auto tokenizer = Tokenizer::load("model.gguf");        or a folder with tokenizer.json
//   auto ids = tokenizer->encode("Hello");                 with bos and eos if the model wants them
//   auto text = tokenizer->decode(*ids);
//
// Two kinds of tokeniser are read: byte-level BPE and sentencepiece's BPE. Others are an error that
// names them. Ids are those of the peer that reads the same file: llama.cpp for GGUF, Hugging
// Face's `tokenizers` for a folder. Where the two differ, docs/tokenizers.md says how.
//
// A tokeniser does not change once it is loaded, so threads may share it. Copies share its tables.
// Link bittern::text.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bittern/status.h"

namespace bittern {

namespace text {
class TokenizerTables;
}

struct EncodeOptions {
  bool add_special = true;    // put bos and eos around the text, if the model asks for them
  bool parse_special = true;  // text that spells a control token becomes that token
};

struct ChatMessage {
  std::string role;  // "system", "user" or "assistant"
  std::string content;
};

struct ChatOptions {
  bool add_generation_prompt = true;  // end with the beginning of the assistant's answer
  bool thinking = true;               // false: an empty thought opens the answer (Qwen3)
  std::string date = "26 Jul 2024";   // today to Llama 3.1 and later; their templates' own default
  std::string format{};  // chatml, llama-3, gemma or qwen; empty: the one of the model's template
};

class Tokenizer {
 public:
  // `path`: a GGUF file, or a folder with tokenizer.json or tokenizer.model.
  static Result<Tokenizer> load(const std::string& path) noexcept;

  // Bytes that are not UTF-8 count as U+FFFD in byte-level BPE, and become byte tokens in
  // sentencepiece's.
  Result<std::vector<std::int32_t>> encode(std::string_view text,
                                           const EncodeOptions& options = {}) const noexcept;

  // The bytes that the tokens spell. Tokens may end within a character: see TokenStream.
  // `skip_special` leaves control tokens out.
  Result<std::string> decode(std::span<const std::int32_t> ids,
                             bool skip_special = false) const noexcept;

  std::int64_t size() const noexcept;  // ids are below it
  // The token as its file spells it: "\u0120the", "<0x0A>", "<|im_end|>". Lives as long as the
  // tokeniser or a copy of it.
  Result<std::string_view> token(std::int32_t id) const noexcept;
  std::optional<std::int32_t> id(std::string_view token) const noexcept;
  bool is_special(std::int32_t id) const noexcept;  // a control token

  std::optional<std::int32_t> bos() const noexcept;
  std::optional<std::int32_t> eos() const noexcept;
  std::span<const std::int32_t> ends() const noexcept;  // what ends an answer: eos, end of turn

  // ---- conversations ----
  // The chat templates of ChatML, Llama 3, Gemma and Qwen are recognised by their text. Any other
  // is an error that says so; ChatOptions::format then chooses one by name.

  // The tokens of a conversation. Only the template's own text becomes control tokens: where a
  // message spells one, that is encoded as plain text.
  Result<std::vector<std::int32_t>> apply_chat(std::span<const ChatMessage> messages,
                                               const ChatOptions& options = {}) const noexcept;
  // The same as text, which no longer says what was whose.
  Result<std::string> chat_text(std::span<const ChatMessage> messages,
                                const ChatOptions& options = {}) const noexcept;
  std::string_view chat_template() const noexcept;  // as the file has it; empty: none

 private:
  friend class TokenStream;
  explicit Tokenizer(std::shared_ptr<const text::TokenizerTables> tables) noexcept
      : tables_(std::move(tables)) {}
  std::shared_ptr<const text::TokenizerTables> tables_;
};

// Decodes token by token and never gives half a character.
class TokenStream {
 public:
  explicit TokenStream(Tokenizer tokenizer, bool skip_special = true) noexcept
      : tokenizer_(std::move(tokenizer)), skip_special_(skip_special) {}

  // The text that this token completes: often "", where a character needs more tokens. Bytes that
  // cannot become a character are U+FFFD. After an error the stream is as it was.
  Result<std::string> push(std::int32_t id) noexcept;
  // U+FFFD if a character is cut off, else "". The stream then starts anew.
  std::string finish() noexcept;

 private:
  Tokenizer tokenizer_;
  bool skip_special_;
  bool begun_ = false;  // the space that encode put before the text is behind us
  std::string pending_;
};

}  // namespace bittern
