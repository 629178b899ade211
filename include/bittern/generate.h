// Text from a model, token by token. `bittern run`, Python's Model.generate and C's
// bittern_generate are this loop, so with the same options they give the same text.
//
//   auto session = Session::make(*model);
//   auto ids = tokenizer->encode("The capital of France is");
//   auto generator = Generator::start(*session, &*tokenizer, *ids, {.max_tokens = 20});
//   while (true) {
//     auto piece = generator->next();
//     if (!piece || !*piece) break;                        an error, or the end
//     std::fputs((*piece)->text.c_str(), stdout);
//   }
//
// Link bittern::model.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bittern/model.h"
#include "bittern/sample.h"
#include "bittern/status.h"
#include "bittern/tokenizer.h"

namespace bittern {

struct GenerateOptions {
  SampleOptions sample{.temperature = 0.8, .top_k = 40, .top_p = 0.95, .min_p = 0.05};
  std::int64_t max_tokens = -1;      // -1: until the model ends or the context is full
  std::vector<std::string> stops{};  // the text ends before such a text
  bool ignore_ends = false;          // go on after a token that ends an answer
  bool special = false;              // control tokens are part of the text
  std::uint64_t step = 0;            // tokens drawn with this seed before (sample.h)
};

struct Generated {
  std::int32_t token = -1;  // -1: none, the rest of the text alone
  // The text that is complete: whole characters, and nothing that may begin a stop string. Often
  // empty. Without a tokeniser, always.
  std::string text{};
};

enum class GenerateEnd { none, token, stop, max_tokens, context };
inline constexpr std::string_view kGenerateEndNames[] = {"none", "token", "stop", "max_tokens",
                                                         "context"};
constexpr auto& enum_names(GenerateEnd) { return kGenerateEndNames; }

// Works on a session, which must outlive it; nobody else may use that meanwhile.
class Generator {
 public:
  // Appends the prompt, of at least one token, to what the session holds. There must be room for
  // one more. `tokenizer` null: no text, and no token ends it. Refused where the tokeniser has
  // tokens that the model has no logits for; logits without a token are never drawn. The watcher
  // sees the prompt's pass, and may cancel it: the session is then as it was.
  static Result<Generator> start(Session& session, const Tokenizer* tokenizer,
                                 std::span<const std::int32_t> prompt,
                                 const GenerateOptions& options = {},
                                 Watcher* watcher = nullptr) noexcept;
  Generator(Generator&&) noexcept;
  Generator& operator=(Generator&&) noexcept;
  ~Generator();

  // The next token; nothing at the end. A token is appended to the session by the call after the
  // one that gives it, so the last one never is. After an error it may be called again.
  Result<std::optional<Generated>> next() noexcept;
  // Ends the text here: what was held back comes with the next call.
  void finish() noexcept;

  GenerateEnd end() const noexcept;      // why it ended
  std::int64_t tokens() const noexcept;  // given so far
  std::uint64_t step() const noexcept;   // GenerateOptions::step of what comes after

 private:
  struct State;
  explicit Generator(std::unique_ptr<State> state) noexcept;
  std::unique_ptr<State> state_;
};

// Whether the model has logits for every token that the tokeniser knows.
Status check_vocabulary(const ModelInfo& model, const Tokenizer& tokenizer) noexcept;

}  // namespace bittern
