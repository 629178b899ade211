#include "eval/pieces.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

namespace bittern {

Result<std::vector<Piece>> cut_pieces(std::int64_t tokens, const EvalOptions& o) {
  if (static_cast<std::size_t>(o.dialect) >= std::size(kPerplexityDialectNames))
    return invalid("dialect: " + std::to_string(static_cast<int>(o.dialect)) +
                   ", expected llama, segments or windows");
  if (o.context < 2)
    return invalid("context: " + std::to_string(o.context) + ", expected 2 or more");
  if (o.pieces < 0) return invalid("pieces: " + std::to_string(o.pieces) + ", expected 0 or more");
  const bool windows = o.dialect == PerplexityDialect::windows;
  if (tokens < (windows ? 2 : o.context))
    return invalid("tokens: " + std::to_string(tokens) + ", expected at least " +
                   (windows ? "2" : std::to_string(o.context) + ", the context"));
  const std::int64_t half = o.context / 2;
  std::vector<Piece> pieces;
  const auto room = [&] { return o.pieces == 0 || std::cmp_less(pieces.size(), o.pieces); };
  if (windows) {
    for (std::int64_t scored = 1; scored < tokens && room();) {
      const std::int64_t end =
          std::min(pieces.empty() ? o.context : scored + o.context - half, tokens);
      const std::int64_t begin = std::max<std::int64_t>(0, end - o.context);
      pieces.push_back({begin, end - begin, scored - 1 - begin});
      scored = end;
    }
  } else {
    // Of two tokens the second alone can be scored.
    const std::int64_t from =
        o.dialect == PerplexityDialect::llama ? std::min(half, o.context - 2) : 0;
    for (std::int64_t begin = 0; begin + o.context <= tokens && room(); begin += o.context)
      pieces.push_back({begin, o.context, from});
  }
  return pieces;
}

std::vector<std::int32_t> piece_tokens(const Piece& piece, std::span<const std::int32_t> tokens,
                                       const EvalOptions& options) {
  const auto part =
      tokens.subspan(static_cast<std::size_t>(piece.begin), static_cast<std::size_t>(piece.length));
  std::vector<std::int32_t> in(part.begin(), part.end());
  if (options.first >= 0) in[0] = options.first;
  return in;
}

}  // namespace bittern
