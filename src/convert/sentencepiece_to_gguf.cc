// sentencepiece's BPE for GGUF: from tokenizer.json, whose merges become scores, or from
// tokenizer.model.
#include <algorithm>
#include <charconv>
#include <map>

#include "convert/tokenizer_parts.h"
#include "formats/json_events.h"

namespace bittern::tokenizer_detail {

namespace {

bool found_beforehand(TokenType type) {
  return type == TokenType::control || type == TokenType::user_defined ||
         type == TokenType::unknown;
}

// Tokens whose merges are mixed share a rank: runs of a letter, longer left parts first.
Status check_runs(const Tokens& t, std::span<const MergeIds> merges) {
  using Lengths = std::pair<std::size_t, std::size_t>;
  std::map<std::string_view, Lengths> before;  // by letter
  for (const MergeIds& merge : merges) {
    const std::string_view left = t.texts[merge.left], right = t.texts[merge.right];
    const std::string_view letter = repeated_letter(t.texts[merge.joined]);
    const Lengths lengths(left.size(), right.size());
    const auto [it, fresh] = before.emplace(letter, lengths);
    if (letter.empty() || (!fresh && lengths >= it->second))
      return unsupported(
          t.path + ": model.merges: " + in_quotes(left) + " " + in_quotes(right) +
          " is between those of another token, expected a token's to follow each other: " +
          "llama.cpp ranks tokens");
    it->second = lengths;
  }
  return {};
}

// Scores with which llama.cpp joins what the merges would join, or why there are none. It joins any
// two neighbours that make a token, so every such pair must be a merge. It ranks tokens, not pairs,
// so the merges of a token must follow each other (for runs of one letter, see repeated_letter).
Result<std::vector<float>> scores_of(const Tokens& t, std::span<const MergeIds> merges) {
  const std::string where = t.path + ": model.merges: ";
  std::vector<std::uint32_t> count(t.texts.size()), last(t.texts.size());
  for (std::uint32_t i = 0; i < merges.size(); ++i) {
    for (const std::uint32_t part : {merges[i].left, merges[i].right}) {
      if (found_beforehand(t.types[part]))
        return unsupported(where + in_quotes(t.texts[merges[i].joined]) + " is joined from " +
                           in_quotes(t.texts[part]) +
                           ", expected no added token: llama.cpp finds it in the text beforehand");
    }
    ++count[merges[i].joined];
    last[merges[i].joined] = i;
  }
  for (std::uint32_t id = 0; id < t.texts.size(); ++id) {
    const std::string_view text = t.texts[id];
    if (found_beforehand(t.types[id]) || t.types[id] == TokenType::unused) continue;
    if (text.size() > kMostPieceBytes)
      return invalid(t.path + ": model.vocab: token " + std::to_string(id) + " has " +
                     std::to_string(text.size()) + " bytes, expected at most " +
                     std::to_string(kMostPieceBytes));
    std::size_t pairs = 0;
    for (const PieceSplit& split : piece_splits(t.texts, t.index, text)) {
      const std::string_view left = text.substr(0, split.left), right = text.substr(split.left);
      const auto found = [&](std::string_view part) {
        return found_beforehand(t.types[static_cast<std::size_t>(t.find(part))]);
      };
      if (split.tokens && (found(left) || found(right))) continue;
      if (!split.tokens)
        return unsupported(t.path + ": model.vocab: " + in_quotes(text) + " is made of " +
                           in_quotes(left) + " and " + in_quotes(right) +
                           ", expected both to be tokens: llama.cpp joins them");
      ++pairs;
    }
    if (pairs != count[id])
      return unsupported(where + std::to_string(count[id]) + " of the " + std::to_string(pairs) +
                         " pairs of tokens that make " + in_quotes(text) +
                         ", expected all: llama.cpp joins any");
  }
  std::vector<float> scores(t.texts.size());
  float score = 0;
  for (std::size_t i = 0, end; i < merges.size(); i = end) {
    score -= 1;
    bool mixed = false;
    end = i + 1;
    for (std::size_t k = i; k < end; ++k) {
      const std::uint32_t id = merges[k].joined;
      end = std::max<std::size_t>(end, last[id] + 1);
      mixed |= id != merges[i].joined;
      scores[id] = score;
    }
    // The shortest runs have one merge each, which may follow after all others.
    for (; mixed && end < merges.size() && merges[end].left == merges[end].right &&
           count[merges[end].joined] == 1;
         ++end) {
      scores[merges[end].joined] = score;
    }
    if (mixed) BITTERN_TRY(check_runs(t, merges.subspan(i, end - i)));
  }
  return scores;
}

}  // namespace

Result<Metadata> from_sentencepiece_json(TokenizerJson& json, const std::string& path,
                                         const Companions& c, const Cutting& cutting,
                                         std::int64_t vocab_size) {
  const Json& model = json.rest["model"];
  const auto normalizing = normalizing_of(json.rest, path);
  if (!normalizing) return normalizing.status();
  const bool metaspace = cutting.metaspace.has_value();
  if (normalizing->nfc || normalizing->marks_spaces == metaspace ||
      !true_member(model, "byte_fallback") || true_member(model, "ignore_merges"))
    return unsupported(
        path + ": expected byte-level BPE, or BPE with byte_fallback and spaces marked by U+2581");
  for (const std::string& cut : cutting.cuts) {
    if (cut != " ")
      return unsupported(path + ": pre_tokenizer: cuts by " + in_quotes(cut) +
                         ", expected none where spaces are marked by U+2581");
  }
  auto tokens = gather(json, path, vocab_size, true);
  if (!tokens) return tokens.status();
  Tokens& t = *tokens;
  auto ids = named_ids(c, t);
  if (!ids) return ids.status();
  auto& unk = (*ids)[kUnk];
  if (const std::int64_t id = t.find(text_member(model, "unk_token")); !unk && id >= 0)
    unk = static_cast<std::uint32_t>(id);
  if (unk) t.types[*unk] = TokenType::unknown;
  for (int byte = 0; byte < 256; ++byte) {
    const std::int64_t id = t.find(byte_token(byte));
    if (id < 0)
      return unsupported(path + ": model.vocab: lacks " + in_quotes(byte_token(byte)) +
                         ", expected a token for every byte");
    t.types[static_cast<std::size_t>(id)] = TokenType::byte;
  }
  auto merges = merge_ids(json, t, true);
  if (!merges) return merges.status();
  // Tokens found in the text beforehand are never joined.
  std::erase_if(*merges,
                [&](const MergeIds& merge) { return found_beforehand(t.types[merge.joined]); });
  auto scores = scores_of(t, *merges);
  if (!scores) return scores.status();
  t.scores = std::move(*scores);

  const auto affixes = affixes_of(c, json.rest, path, t, *ids);
  if (!affixes) return affixes.status();
  Metadata out;
  put_tokens(out, t, "llama", "default");
  put_ids(out, *ids, *affixes);
  const bool prefix = metaspace ? *cutting.metaspace != "never" : normalizing->prepends;
  out.emplace_back("tokenizer.ggml.add_space_prefix", GgufData(prefix));
  BITTERN_TRY(put_chat_template(out, c));
  return out;
}

// ---- tokenizer.model ----

namespace {

// Tokens that tokenizer_config.json or added_tokens.json puts beside or over the pieces.
Status place_added(Tokens& t, std::vector<Slot>& slots, const Companions& c, const Json& added) {
  const auto put = [&](const std::string& where, std::uint64_t id, const std::string& content,
                       bool special) -> Status {
    if (id >= slots.size())
      return invalid(where + ": token " + std::to_string(id) + ", " + in_quotes(content) +
                     ": expected an id below the model's " + std::to_string(slots.size()) +
                     " tokens");
    const bool unknown = slots[id].taken && slots[id].type == TokenType::unknown;
    slots[id] = {t.pool.add(special ? content : with_spaces(content)),
                 unknown   ? TokenType::unknown
                 : special ? TokenType::control
                           : TokenType::user_defined,
                 true};
    return {};
  };
  if (added.is_object()) {
    for (const auto& [content, id] : added.items()) {
      const std::string where = c.folder + "/added_tokens.json";
      if (!id.is_number_unsigned())
        return invalid(where + ": " + in_quotes(content) + ": " + id.dump() + ", expected an id");
      BITTERN_TRY(put(where, id.get<std::uint64_t>(), content, false));
    }
  }
  const Json* decoder = member(c.config, "added_tokens_decoder");
  if (decoder == nullptr || !decoder->is_object()) return {};
  for (const auto& [key, token] : decoder->items()) {
    const std::string where = c.folder + "/tokenizer_config.json: added_tokens_decoder";
    std::uint64_t id = 0;
    const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), id);
    const std::string content = text_member(token, "content");
    if (error != std::errc() || end != key.data() + key.size() || content.empty())
      return invalid(where + ": " + in_quotes(key) + ", expected an id and its token's content");
    BITTERN_TRY(put(where, id, content, true_member(token, "special")));
  }
  return {};
}

}  // namespace

Result<Metadata> from_sentencepiece_model(const std::string& folder, std::int64_t vocab_size) {
  const std::string path = folder + "/tokenizer.model";
  auto model = read_sentencepiece(path);
  if (!model) return model.status();
  BITTERN_TRY(check_vocabulary_size(path, vocab_size));
  const auto companions = read_companions(folder);
  if (!companions) return companions.status();
  const auto added = read_json_file(folder + "/added_tokens.json");
  if (!added) return added.status();

  Tokens t;
  t.path = path;
  t.pool = std::move(model->texts);
  t.scores.resize(static_cast<std::size_t>(vocab_size));
  std::vector<Slot> slots(t.scores.size());
  for (std::size_t id = 0; id < model->pieces.size(); ++id) {
    const auto& piece = model->pieces[id];
    TextPool::Span text = piece.text;
    if (piece.type == TokenType::user_defined) text = t.pool.add(with_spaces(t.pool.view(text)));
    BITTERN_TRY(place(t, slots, "pieces", id, text, piece.type));
    t.scores[id] = piece.score;
  }
  BITTERN_TRY(place_added(t, slots, *companions, *added));
  BITTERN_TRY(finish(t, slots));

  auto ids = named_ids(*companions, t);
  if (!ids) return ids.status();
  const std::pair<std::size_t, std::int64_t> own[] = {
      {kBos, model->bos}, {kEos, model->eos}, {kUnk, model->unk}, {kPad, model->pad}};
  for (const auto& [which, id] : own) {
    if (!(*ids)[which] && id >= 0 && id < static_cast<std::int64_t>(model->pieces.size()))
      (*ids)[which] = static_cast<std::uint32_t>(id);
  }
  // sentencepiece itself puts nothing around the text; Hugging Face's classes for it put bos.
  const Affixes affixes{(*ids)[kBos] && true_member(companions->config, "add_bos_token", true),
                        (*ids)[kEos] && true_member(companions->config, "add_eos_token", false)};
  Metadata out;
  put_tokens(out, t, "llama", "default");
  put_ids(out, *ids, affixes);
  out.emplace_back("tokenizer.ggml.add_space_prefix", GgufData(model->add_dummy_prefix));
  BITTERN_TRY(put_chat_template(out, *companions));
  return out;
}

}  // namespace bittern::tokenizer_detail
