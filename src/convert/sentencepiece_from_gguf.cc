// sentencepiece's BPE in tokenizer.json: GGUF's scores become merges.
#include <algorithm>
#include <cmath>
#include <map>
#include <span>
#include <utility>

#include "convert/tokenizer_source.h"
#include "formats/json_events.h"

namespace bittern::tokenizer_detail {

namespace {

Status read_scores(const Source& s, std::vector<float>& scores) {
  const auto numbers = s.file.numbers("tokenizer.ggml.scores");
  if (!numbers) return numbers.status();
  const std::string where = s.where("ggml.scores");
  if (numbers->size() != s.tokens.size())
    return invalid(where + std::to_string(numbers->size()) + " scores for " +
                   std::to_string(s.tokens.size()) + " tokens, expected one each");
  scores.assign(numbers->begin(), numbers->end());
  for (std::size_t id = 0; id < scores.size(); ++id) {
    if (!std::isfinite(scores[id]))
      return invalid(where + "that of token " + std::to_string(id) +
                     " is not finite, expected a number");
  }
  return {};
}

// llama.cpp joins the two neighbours whose token has the highest score, among equals the leftmost.
// tokenizer.json joins the two whose merge comes first. Both agree if no two joined tokens have the
// same score; for runs of one letter with the same score, see repeated_letter. Tokens that are
// found in the text beforehand are never joined.
struct ScoredMerges {
  std::vector<std::uint32_t> order;  // tokens that are joined, by falling score
  std::size_t bytes = 0;             // of their merges as JSON
};

// Where the tokens of one score from `i` on end.
std::size_t end_of_equals(std::span<const std::uint32_t> order, std::span<const float> scores,
                          std::size_t i) {
  std::size_t end = i + 1;
  while (end < order.size() && scores[order[end]] == scores[order[i]]) ++end;
  return end;
}

Result<ScoredMerges> merges_by_score(const Source& s, std::span<const float> scores) {
  ScoredMerges out;
  std::size_t count = 0;
  for (std::uint32_t id = 0; id < s.tokens.size(); ++id) {
    const std::string_view token = s.tokens[id];
    if (s.added(id) || s.filler(id)) continue;
    if (token.size() > kMostPieceBytes)
      return invalid(s.where("ggml.tokens") + "token " + std::to_string(id) + " has " +
                     std::to_string(token.size()) + " bytes, expected at most " +
                     std::to_string(kMostPieceBytes));
    const auto splits = piece_splits(s.tokens, s.index, token);
    for (const PieceSplit& split : splits) {
      if (!split.tokens)
        return unsupported(
            s.where("ggml.tokens") + "token " + std::to_string(id) + ", " + in_quotes(token) +
            ", is made of " + in_quotes(token.substr(0, split.left)) + " and " +
            in_quotes(token.substr(split.left)) +
            ", expected both to be tokens, without which tokenizer.json cannot join them");
    }
    if (splits.empty()) continue;
    out.order.push_back(id);
    out.bytes += splits.size() * (token.size() + 20);
    count += splits.size();
  }
  if (count > kMostMerges)
    return invalid(s.where("ggml.tokens") + std::to_string(count) +
                   " ways to join tokens, expected at most " + std::to_string(kMostMerges));
  std::ranges::stable_sort(out.order,
                           [&](std::uint32_t a, std::uint32_t b) { return scores[a] > scores[b]; });
  std::map<std::string_view, std::size_t> runs;  // of each letter
  for (const std::uint32_t id : out.order) ++runs[repeated_letter(s.tokens[id])];
  for (std::size_t i = 0, end; i < out.order.size(); i = end) {
    end = end_of_equals(out.order, scores, i);
    if (end - i == 1) continue;
    std::map<std::string_view, std::size_t> here;
    for (std::size_t k = i; k < end; ++k) ++here[repeated_letter(s.tokens[out.order[k]])];
    for (const auto& [letter, times] : here) {
      if (!letter.empty() && times == runs[letter]) continue;
      return unsupported(
          s.where("ggml.scores") + in_quotes(s.tokens[out.order[i]]) + " and " +
          in_quotes(s.tokens[out.order[i + 1]]) +
          " have one score, expected different ones: tokenizer.json has no equal merges");
    }
  }
  return out;
}

void put_scored_merges(const Source& s, const ScoredMerges& merges, std::span<const float> scores,
                       std::string& out) {
  struct Merge {
    std::string_view left, right;
  };
  bool first = true;
  for (std::size_t i = 0, end; i < merges.order.size(); i = end) {
    end = end_of_equals(merges.order, scores, i);
    std::vector<Merge> equals;
    for (std::size_t k = i; k < end; ++k) {
      const std::string_view token = s.tokens[merges.order[k]];
      for (const PieceSplit& split : piece_splits(s.tokens, s.index, token))
        equals.push_back({token.substr(0, split.left), token.substr(split.left)});
    }
    std::ranges::stable_sort(equals, [](const Merge& a, const Merge& b) {
      return std::pair(a.left.size(), a.right.size()) > std::pair(b.left.size(), b.right.size());
    });
    for (const Merge& merge : equals)
      put_merge(out, merge.left, merge.right, std::exchange(first, false));
  }
}

}  // namespace

Status read_sentencepiece_settings(Source& s, bool& add_space_prefix, std::vector<float>& scores) {
  // llama.cpp's defaults.
  s.add_bos = true;
  for (const auto& [which, id] :
       {std::pair{kBos, std::size_t{1}}, {kEos, std::size_t{2}}, {kUnk, std::size_t{0}}}) {
    if (id < s.tokens.size()) s.named[which] = id;
  }
  BITTERN_TRY(read_specials(s));
  BITTERN_TRY(read_flag(s, "add_space_prefix", add_space_prefix));
  BITTERN_TRY(read_scores(s, scores));
  for (int byte = 0; byte < 256; ++byte) {
    if (s.index.find(s.tokens, byte_token(byte)) < 0)
      return unsupported(s.where("ggml.tokens") + "lacks " + in_quotes(byte_token(byte)) +
                         ", expected a token for every byte");
  }
  return {};
}

Result<TextFile> sentencepiece_tokenizer(Source& s) {
  bool add_space_prefix = true;
  std::vector<float> scores;
  BITTERN_TRY(read_sentencepiece_settings(s, add_space_prefix, scores));
  const auto merges = merges_by_score(s, scores);
  if (!merges) return merges.status();

  const Json mark = {{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", kSpaceMark}};
  Json decoders =
      Json::array({{{"type", "Replace"}, {"pattern", {{"String", kSpaceMark}}}, {"content", " "}},
                   {{"type", "ByteFallback"}},
                   {{"type", "Fuse"}}});
  if (add_space_prefix)
    decoders.push_back({{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}});
  const Frame frame{
      .normalizer =
          add_space_prefix
              ? Json{{"type", "Sequence"},
                     {"normalizers",
                      Json::array({{{"type", "Prepend"}, {"prepend", kSpaceMark}}, mark})}}
              : mark,
      .pre_tokenizer = nullptr,
      .decoder = {{"type", "Sequence"}, {"decoders", decoders}},
      .model = bpe_model(s.named[kUnk] ? Json(s.token(*s.named[kUnk])) : Json(), true, false),
  };
  return tokenizer_json(s, frame, merges->bytes, [&](std::string& out) {
    put_scored_merges(s, *merges, scores, out);
    return Status();
  });
}

}  // namespace bittern::tokenizer_detail
