// The tokens and merges of a tokeniser, by id.
#include <algorithm>

#include "convert/tokenizer_parts.h"
#include "formats/json_events.h"

namespace bittern::tokenizer_detail {

Status place(Tokens& t, std::vector<Slot>& slots, const std::string& list, std::size_t id,
             TextPool::Span text, TokenType type) {
  const std::string where = t.path + ": " + list + ": token " + std::to_string(id) + ", " +
                            in_quotes(t.pool.view(text)) + ": ";
  if (id >= slots.size())
    return invalid(where + "expected an id below the model's " + std::to_string(slots.size()) +
                   " tokens");
  if (slots[id].taken)
    return invalid(where + "the id of " + in_quotes(t.pool.view(slots[id].text)) +
                   " too, expected one token");
  slots[id] = {text, type, true};
  return {};
}

Status finish(Tokens& t, std::vector<Slot>& slots) {
  for (std::size_t id = 0; id < slots.size(); ++id) {
    if (!slots[id].taken) slots[id].text = t.pool.add(padding_token(id));
  }
  t.pool.bytes.reserve(64);  // on the heap, so that views stay good when it moves
  t.texts.reserve(slots.size());
  t.types.reserve(slots.size());
  t.index = TokenIndex(slots.size());
  for (std::uint32_t id = 0; id < slots.size(); ++id) {
    t.texts.push_back(t.pool.view(slots[id].text));
    t.types.push_back(slots[id].type);
    if (t.texts[id].empty())
      return invalid(t.path + ": token " + std::to_string(id) + " is empty, expected text");
    if (const std::int64_t other = t.index.put(t.texts, id); other >= 0)
      return invalid(t.path + ": tokens " + std::to_string(other) + " and " + std::to_string(id) +
                     " are both " + in_quotes(t.texts[id]) + ", expected each once");
  }
  return {};
}

Status check_vocabulary_size(const std::string& path, std::int64_t size) {
  if (size >= 1 && size <= static_cast<std::int64_t>(kMostTokens)) return {};
  return invalid(path + ": a model of " + std::to_string(size) + " tokens, expected 1 to " +
                 std::to_string(kMostTokens));
}

std::string with_spaces(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size();) {
    const bool mark = text.substr(i, 3) == kSpaceMark;
    out += mark ? ' ' : text[i];
    i += mark ? 3 : 1;
  }
  return out;
}

Result<Tokens> gather(TokenizerJson& json, const std::string& path, std::int64_t vocab_size,
                      bool sentencepiece) {
  BITTERN_TRY(check_vocabulary_size(path, vocab_size));
  Tokens t;
  t.path = path;
  t.pool = std::move(json.texts);
  std::vector<Slot> slots(static_cast<std::size_t>(vocab_size));
  for (const auto& entry : json.vocabulary)
    BITTERN_TRY(place(t, slots, "model.vocab", entry.id, entry.text, TokenType::normal));
  for (const AddedToken& token : json.added) {
    if (token.lstrip || token.single_word)
      return unsupported(path + ": added_tokens: " + in_quotes(token.content) +
                         " has lstrip, rstrip or single_word, which GGUF cannot express");
    if (token.id < slots.size() && slots[token.id].taken &&
        t.pool.view(slots[token.id].text) == token.content) {
      slots[token.id].taken = false;
    }
    const std::string text =
        sentencepiece && !token.special ? with_spaces(token.content) : token.content;
    BITTERN_TRY(place(t, slots, "added_tokens", token.id, t.pool.add(text),
                      token.special ? TokenType::control : TokenType::user_defined));
  }
  BITTERN_TRY(finish(t, slots));
  return t;
}

Result<std::vector<MergeIds>> merge_ids(const TokenizerJson& json, const Tokens& t,
                                        bool sentencepiece) {
  std::vector<MergeIds> ids;
  ids.reserve(json.merges.size());
  std::string joined;
  for (const auto& merge : json.merges) {
    const std::string_view left = t.pool.view(merge.left), right = t.pool.view(merge.right);
    joined.assign(left).append(right);
    std::uint32_t found[3];
    int k = 0;
    for (const std::string_view part : {left, right, std::string_view(joined)}) {
      std::int64_t id = t.find(part);
      if (id < 0 && sentencepiece) id = t.find(with_spaces(part));  // a token of the user's
      if (id < 0)
        return invalid(t.path + ": model.merges: merge " + std::to_string(ids.size()) + ", " +
                       in_quotes(left) + " " + in_quotes(right) + ": " + in_quotes(part) +
                       " is not a token of the vocabulary");
      found[k++] = static_cast<std::uint32_t>(id);
    }
    ids.push_back({found[0], found[1], found[2]});
  }
  // Which of two equal merges counts differs from reader to reader.
  std::vector<std::uint64_t> pairs(ids.size());
  std::ranges::transform(ids, pairs.begin(), [](const MergeIds& merge) {
    return std::uint64_t{merge.left} << 32 | merge.right;
  });
  std::ranges::sort(pairs);
  if (const auto twice = std::ranges::adjacent_find(pairs); twice != pairs.end())
    return invalid(t.path + ": model.merges: " + in_quotes(t.texts[*twice >> 32]) + " " +
                   in_quotes(t.texts[*twice & 0xffffffff]) + " twice, expected once");
  return ids;
}

}  // namespace bittern::tokenizer_detail
