#include "distill/calibration_text.h"

#include <algorithm>

#include "bittern/tokenizer.h"
#include "eval/text_file.h"

namespace bittern {

Result<CalibrationText> read_calibration_text(const std::string& model, const std::string& path,
                                              std::int64_t pieces, std::int64_t context) {
  const auto text = read_text(path, false, "");
  if (!text) return text.status();
  const auto tokenizer = Tokenizer::load(model);
  if (!tokenizer) return tokenizer.status();
  const auto tokens = tokenizer->encode(*text, {.add_special = false, .parse_special = false});
  if (!tokens) return tokens.status();
  const auto first = first_of_pieces(*tokenizer);
  if (!first) return first.status();
  const std::int64_t all = static_cast<std::int64_t>(tokens->size()) / context;
  if (all < 1)
    return invalid(path + ": " + std::to_string(tokens->size()) + " tokens, expected at least " +
                   std::to_string(context) + ", a piece of them (@{context} makes it shorter)");
  CalibrationText read{.context = context, .tokens = {}};
  const std::int64_t used = std::min(pieces, all);
  for (std::int64_t i = 0; i < used; ++i) {
    const auto begin = tokens->begin() + (all / used * i + all % used * i / used) * context;
    read.tokens.insert(read.tokens.end(), begin, begin + context);
    if (*first >= 0) read.tokens[static_cast<std::size_t>(i * context)] = *first;
  }
  return read;
}

}  // namespace bittern
