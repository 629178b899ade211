#include "distill/samples.h"

#include <algorithm>
#include <span>
#include <string>
#include <utility>

#include "bittern/generate.h"

namespace bittern {
namespace {

constexpr std::int64_t kSamples = 3, kPrompt = 24, kMostTokens = 40;

// What `model` writes after `prompt`, in a context of `context` tokens.
Result<std::string> continuation(const Tokenizer& tokenizer, const Model& model,
                                 std::span<const std::int32_t> prompt, std::int64_t context) {
  auto session = Session::make(model, {.context = context});
  if (!session) return session.status();
  const std::int64_t room = context - static_cast<std::int64_t>(prompt.size());
  auto generator =
      Generator::start(*session, &tokenizer, prompt,
                       {.sample = {.temperature = 0}, .max_tokens = std::min(kMostTokens, room)});
  if (!generator) return generator.status();
  std::string text;
  while (true) {
    const auto piece = generator->next();
    if (!piece) return piece.status();
    if (!*piece) return text;
    text += (*piece)->text;
  }
}

}  // namespace

Result<std::vector<DistillSample>> write_samples(const Tokenizer& tokenizer,
                                                 const CalibrationText& text, const Model& teacher,
                                                 const Model& start, const Model& result) {
  std::vector<DistillSample> samples;
  const std::int64_t length = std::min(kPrompt, text.context / 2);
  for (std::int64_t i = 0; i < std::min(kSamples, text.pieces()); ++i) {
    const std::span prompt(text.piece(i), static_cast<std::size_t>(length));
    DistillSample sample;
    auto words = tokenizer.decode(prompt, true);
    if (!words) return words.status();
    sample.prompt = std::move(*words);
    const std::pair<const Model&, std::string&> writers[] = {
        {teacher, sample.teacher}, {start, sample.start}, {result, sample.result}};
    for (const auto& [model, to] : writers) {
      auto written = continuation(tokenizer, model, prompt, text.context);
      if (!written) return written.status();
      to = std::move(*written);
    }
    samples.push_back(std::move(sample));
  }
  return samples;
}

}  // namespace bittern
