#include "distill/self_text.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "bittern/sample.h"
#include "core/ranks.h"
#include "core/split_mix.h"

namespace bittern {
namespace {

// Pieces that are written together: their rows meet the weights at once.
constexpr std::int64_t kTogether = 32;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

}  // namespace

Result<CalibrationText> write_text(const Model& model, const Tokenizer& tokenizer,
                                   std::int64_t pieces, std::int64_t context, std::uint64_t seed,
                                   const std::function<Status(double share)>& tell, Ranks* ranks) {
  const auto first = tokenizer.bos() ? tokenizer.bos() : tokenizer.eos();
  if (!first)
    return invalid(
        "the model has neither a bos nor an eos token to begin a text with, expected "
        "@{data}");
  const std::int64_t together =
      std::min(kTogether, (pieces + count_of(ranks) - 1) / count_of(ranks));
  const std::int64_t width = model.info().hidden, vocab = model.info().vocab;
  const std::int64_t tokens = std::min(vocab, tokenizer.size());
  std::vector<Session> sessions;
  for (std::int64_t i = 0; i < together; ++i) {
    auto session = Session::make(model, {.context = context});
    if (!session) return session.status();
    sessions.push_back(std::move(*session));
  }
  std::vector<float> hidden(at(together * width)), logits(at(together * vocab));
  CalibrationText text{.context = context, .tokens = {}};
  text.tokens.resize(at(pieces * context), *first);
  const auto make = [&](std::int64_t item, Packer& out) -> Status {
    const std::int64_t begin = item * together, count = std::min(together, pieces - begin);
    for (std::int64_t i = 0; i < count; ++i) BITTERN_TRY(sessions[at(i)].truncate(0));
    for (std::int64_t t = 0; t + 1 < context; ++t) {
      std::vector<SessionTokens> steps;
      for (std::int64_t i = 0; i < count; ++i)
        steps.push_back({&sessions[at(i)], {text.piece(begin + i) + t, 1}});
      const auto rows = view(hidden.data(), {count, width});
      BITTERN_TRY(model.hidden(steps, rows));
      BITTERN_TRY(model.logits(rows, view(logits.data(), {count, vocab})));
      for (std::int64_t i = 0; i < count; ++i) {
        const std::uint64_t own = split_mix(seed + kGolden * static_cast<std::uint64_t>(begin + i));
        // An embedding may have rows behind the last token.
        const auto next = sample({logits.data() + i * vocab, at(tokens)}, {}, {.seed = own},
                                 static_cast<std::uint64_t>(t));
        if (!next) return next.status();
        text.tokens[at((begin + i) * context + t + 1)] = *next;
      }
      BITTERN_TRY(tell(static_cast<double>(begin * context + (t + 1) * count) /
                       static_cast<double>(pieces * context)));
    }
    const auto own = text.tokens.begin() + begin * context;
    out.add(std::vector<std::int32_t>(own, own + count * context));
    return {};
  };
  const auto take = [&](std::int64_t item, Unpacker in) {
    const auto written = in.next<std::vector<std::int32_t>>();
    std::copy(written.begin(), written.end(), text.tokens.begin() + item * together * context);
    return Status();
  };
  BITTERN_TRY(deal(ranks, (pieces + together - 1) / together, DealTo::all, make, take));
  return text;
}

}  // namespace bittern
