#include "bittern/generate.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "core/guarded.h"

namespace bittern {
namespace {

// Text that streams out, held back where it may become a stop string.
class Held {
 public:
  explicit Held(const std::vector<std::string>& stops) : stops_(stops) {}

  // What may be shown of it by now. After `stopped` nothing more comes.
  std::string add(std::string_view text) {
    text_ += text;
    std::size_t stop_at = text_.npos, keep = 0;
    for (const std::string& stop : stops_) {
      stop_at = std::min(stop_at, text_.find(stop));
      for (std::size_t n = std::min(stop.size() - 1, text_.size()); n > keep; --n)
        if (text_.ends_with(std::string_view(stop).substr(0, n))) keep = n;
    }
    stopped = stop_at != text_.npos;
    std::string shown = text_.substr(0, stopped ? stop_at : text_.size() - keep);
    text_.erase(0, stopped ? text_.npos : shown.size());
    return shown;
  }
  std::string rest() { return std::exchange(text_, {}); }

  bool stopped = false;

 private:
  const std::vector<std::string>& stops_;
  std::string text_;
};

Status check(const Session& session, const ModelInfo& model, const Tokenizer* tokenizer,
             std::span<const std::int32_t> prompt, const GenerateOptions& options) {
  const auto fail = [](const std::string& text) { return invalid("generate: " + text); };
  const float zero = 0;
  if (auto drawn = sample({&zero, 1}, {}, options.sample, 0); !drawn) return drawn.status();
  if (options.max_tokens < -1)
    return fail("max_tokens: " + std::to_string(options.max_tokens) + ", expected -1 or more");
  for (const std::string& stop : options.stops)
    if (stop.empty()) return fail("stops: an empty text, expected others");
  if (tokenizer == nullptr && !options.stops.empty())
    return fail("stops: without a tokeniser there is no text that they could end");
  if (tokenizer != nullptr) BITTERN_TRY(check_vocabulary(model, *tokenizer));
  if (prompt.empty()) return fail("prompt: no tokens, expected at least one");
  const std::int64_t room = session.context() - session.size();
  if (std::cmp_greater_equal(prompt.size(), room))
    return fail("prompt: " + std::to_string(prompt.size()) + " tokens" +
                (session.size() > 0 ? " after " + std::to_string(session.size()) : "") +
                ", which leave no room for an answer in a context of " +
                std::to_string(session.context()));
  return {};
}

}  // namespace

struct Generator::State {
  State(Session& s, const Tokenizer* t, const GenerateOptions& o)
      : session(s), options(o), held(options.stops), step(o.step) {
    if (t == nullptr) return;
    tokenizer.emplace(*t);
    stream.emplace(*t, !o.special);
  }

  MutView last() { return view(logits.data(), {1, static_cast<std::int64_t>(logits.size())}); }

  Result<std::int32_t> draw() {
    if (tokenizer)  // a model may have more logits than tokens
      std::fill(logits.begin() + tokenizer->size(), logits.end(),
                -std::numeric_limits<float>::infinity());
    auto token = sample(logits, session.tokens(), options.sample, step);
    if (token) {
      ++step;
    } else if (token.status().message().starts_with("sample: logits: [")) {
      return invalid("generate: the model's logits are not all numbers after " +
                     std::to_string(session.size()) + " tokens; are its weights whole?");
    }
    return token;
  }

  bool ends(std::int32_t token) const {
    if (!tokenizer || options.ignore_ends) return false;
    const auto all = tokenizer->ends();
    return std::find(all.begin(), all.end(), token) != all.end();
  }

  // What is left of the text, once.
  std::optional<Generated> rest() {
    std::string text;
    if (stream && !held.stopped) {
      text = held.add(stream->finish());
      if (!held.stopped) text += held.rest();
    }
    stream.reset();
    return text.empty() ? std::optional<Generated>() : Generated{.text = std::move(text)};
  }

  Result<std::optional<Generated>> next() {
    if (end == GenerateEnd::none && made == options.max_tokens) end = GenerateEnd::max_tokens;
    if (end == GenerateEnd::none && pending) {
      if (session.size() + 1 >= session.context()) {
        end = GenerateEnd::context;
      } else {
        BITTERN_TRY(session.append(std::span(&*pending, 1), last()));
        pending.reset();
      }
    }
    if (end != GenerateEnd::none || finished) return rest();
    const auto token = draw();
    if (!token) return token.status();
    if (ends(*token)) {
      end = GenerateEnd::token;
      return rest();
    }
    Generated out{.token = *token};
    if (stream) {
      auto text = stream->push(*token);
      if (!text) return text.status();
      out.text = held.add(*text);
      if (held.stopped) end = GenerateEnd::stop;
    }
    pending = *token;
    ++made;
    return std::optional(std::move(out));
  }

  Session& session;
  const GenerateOptions options;
  std::optional<Tokenizer> tokenizer;
  std::optional<TokenStream> stream;
  Held held;
  std::vector<float> logits;            // after the session's tokens
  std::optional<std::int32_t> pending;  // given, but not yet in the session
  std::uint64_t step;
  std::int64_t made = 0;
  GenerateEnd end = GenerateEnd::none;
  bool finished = false;  // by finish()
};

Generator::Generator(std::unique_ptr<State> state) noexcept : state_(std::move(state)) {}
Generator::Generator(Generator&&) noexcept = default;
Generator& Generator::operator=(Generator&&) noexcept = default;
Generator::~Generator() = default;

Result<Generator> Generator::start(Session& session, const Tokenizer* tokenizer,
                                   std::span<const std::int32_t> prompt,
                                   const GenerateOptions& options, Watcher* watcher) noexcept {
  return guarded("generate", [&]() -> Result<Generator> {
    const ModelInfo& model = session.model().info();
    BITTERN_TRY(check(session, model, tokenizer, prompt, options));
    auto state = std::make_unique<State>(session, tokenizer, options);
    state->logits.resize(static_cast<std::size_t>(model.vocab));
    BITTERN_TRY(session.append(prompt, state->last(), watcher));
    return Generator(std::move(state));
  });
}

Result<std::optional<Generated>> Generator::next() noexcept {
  return guarded("generate", [&] { return state_->next(); });
}

void Generator::finish() noexcept { state_->finished = true; }
GenerateEnd Generator::end() const noexcept { return state_->end; }
std::int64_t Generator::tokens() const noexcept { return state_->made; }
std::uint64_t Generator::step() const noexcept { return state_->step; }

Status check_vocabulary(const ModelInfo& model, const Tokenizer& tokenizer) noexcept {
  return guarded("generate", [&]() -> Status {
    if (tokenizer.size() <= model.vocab) return {};
    return invalid("tokeniser: " + std::to_string(tokenizer.size()) +
                   " tokens, but the model has embeddings of " + std::to_string(model.vocab) +
                   ", expected one for each token");
  });
}

}  // namespace bittern
