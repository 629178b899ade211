#include "distill/calibration_text.h"

#include <algorithm>
#include <utility>

#include "eval/text_file.h"

namespace bittern {

Result<CalibrationText> read_pieces(const Tokenizer& tokenizer, const std::string& path,
                                    std::int64_t context) {
  const auto text = read_text(path, false, "");
  if (!text) return text.status();
  auto tokens = tokenizer.encode(*text, {.add_special = false, .parse_special = false});
  if (!tokens) return tokens.status();
  const auto first = first_of_pieces(tokenizer);
  if (!first) return first.status();
  CalibrationText read{.context = context, .tokens = std::move(*tokens)};
  for (std::int64_t i = 0; *first >= 0 && i < read.pieces(); ++i)
    read.tokens[static_cast<std::size_t>(i * context)] = *first;
  return read;
}

CalibrationText some_of(const CalibrationText& text, std::int64_t pieces) {
  CalibrationText some{.context = text.context, .tokens = {}};
  const std::int64_t all = text.pieces(), used = std::min(pieces, all);
  for (std::int64_t i = 0; i < used; ++i)
    some.add(text.piece(all / used * i + all % used * i / used));
  return some;
}

Result<CalibrationText> read_calibration_text(const std::string& model, const std::string& path,
                                              std::int64_t pieces, std::int64_t context) {
  const auto tokenizer = Tokenizer::load(model);
  if (!tokenizer) return tokenizer.status();
  const auto text = read_pieces(*tokenizer, path, context);
  if (!text) return text.status();
  if (text->pieces() < 1)
    return invalid(path + ": " + std::to_string(text->tokens.size()) +
                   " tokens, expected at least " + std::to_string(context) +
                   ", a piece of them (@{context} makes it shorter)");
  return some_of(*text, pieces);
}

}  // namespace bittern
