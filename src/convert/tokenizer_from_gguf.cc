#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <map>
#include <new>
#include <nlohmann/json.hpp>
#include <optional>

#include "convert/tokenizer.h"
#include "convert/tokenizer_table.h"
#include "formats/json_events.h"

namespace bittern {
namespace {

using Json = nlohmann::ordered_json;

// What both kinds of tokeniser have in the metadata.
struct Source {
  explicit Source(const GgufFile& gguf) : file(gguf) {}

  const GgufFile& file;
  std::vector<std::string_view> tokens;
  std::vector<TokenType> types;
  TokenIndex index{0};
  std::array<std::optional<std::size_t>, std::size(kNamedTokens)> named;
  std::optional<std::size_t> eot, eom;
  bool add_bos = false, add_eos = false;
  bool phi3 = false;  // special tokens take the spaces after them

  std::string where(std::string_view key) const {
    return file.path() + ": tokenizer." + std::string(key) + ": ";
  }
  std::string token(std::size_t id) const { return std::string(tokens[id]); }
  bool added(std::size_t id) const {
    return types[id] == TokenType::control || types[id] == TokenType::user_defined ||
           types[id] == TokenType::unknown;
  }
  // An id without a token, which llama.cpp's converter fills; nothing to tell of it elsewhere.
  bool filler(std::size_t id) const {
    return types[id] == TokenType::unused && tokens[id] == padding_token(id);
  }
};

Status read_tokens(Source& s) {
  const std::string where = s.where("ggml.tokens");
  const auto array = s.file.array("tokenizer.ggml.tokens");
  if (!array) return array.status();
  if (array->size() == 0 || array->size() > kMostTokens)
    return invalid(where + std::to_string(array->size()) + " tokens, expected 1 to " +
                   std::to_string(kMostTokens));
  auto tokens = s.file.strings("tokenizer.ggml.tokens");
  if (!tokens) return tokens.status();
  s.tokens = std::move(*tokens);
  s.index = TokenIndex(s.tokens.size());
  for (std::uint32_t id = 0; id < s.tokens.size(); ++id) {
    const std::string_view text = s.tokens[id];
    if (text.empty() || !is_utf8(text))
      return invalid(where + "token " + std::to_string(id) +
                     (text.empty() ? " is empty" : " is not UTF-8") + ", expected UTF-8 text");
    if (const std::int64_t other = s.index.put(s.tokens, id); other >= 0)
      return invalid(where + "tokens " + std::to_string(other) + " and " + std::to_string(id) +
                     " are both " + in_quotes(text) + ", expected each once");
  }
  return {};
}

Status read_types(Source& s) {
  s.types.assign(s.tokens.size(), TokenType::normal);
  if (s.file.find("tokenizer.ggml.token_type") == nullptr) return {};
  const std::string where = s.where("ggml.token_type");
  const auto types = s.file.integers("tokenizer.ggml.token_type");
  if (!types) return types.status();
  if (types->size() != s.tokens.size())
    return invalid(where + std::to_string(types->size()) + " types for " +
                   std::to_string(s.tokens.size()) + " tokens, expected one each");
  std::size_t added = 0;
  for (std::size_t id = 0; id < types->size(); ++id) {
    const std::int64_t type = (*types)[id];
    if (type < 1 || type > 6)
      return invalid(where + "type " + std::to_string(type) + " of token " + std::to_string(id) +
                     ", expected 1 to 6");
    s.types[id] = static_cast<TokenType>(type);
    added += s.added(id);
  }
  if (added > kMostAddedTokens)
    return invalid(where + std::to_string(added) +
                   " control and user-defined tokens, expected at most " +
                   std::to_string(kMostAddedTokens));
  return {};
}

Status read_id(const Source& s, const char* name, std::optional<std::size_t>& id) {
  const std::string key = std::string("tokenizer.ggml.") + name + "_token_id";
  if (s.file.find(key) == nullptr) return {};
  const auto value = s.file.uint(key);
  if (!value) return value.status();
  if (*value >= s.tokens.size())
    return invalid(s.file.path() + ": " + key + ": " + std::to_string(*value) +
                   ", expected less than the " + std::to_string(s.tokens.size()) + " tokens");
  id = *value;
  return {};
}

Status read_flag(const Source& s, const char* name, bool& flag) {
  const std::string key = std::string("tokenizer.ggml.") + name;
  if (s.file.find(key) == nullptr) return {};
  const auto value = s.file.boolean(key);
  if (!value) return value.status();
  flag = *value;
  return {};
}

Status read_specials(Source& s) {
  for (std::size_t i = 0; i < s.named.size(); ++i)
    BITTERN_TRY(read_id(s, kNamedTokens[i].gguf, s.named[i]));
  BITTERN_TRY(read_id(s, "eot", s.eot));
  BITTERN_TRY(read_id(s, "eom", s.eom));
  BITTERN_TRY(read_flag(s, "add_bos_token", s.add_bos));
  BITTERN_TRY(read_flag(s, "add_eos_token", s.add_eos));
  if (s.add_bos && !s.named[kBos])
    return invalid(s.where("ggml.add_bos_token") + "true, expected a bos_token_id then");
  if (s.add_eos && !s.named[kEos])
    return invalid(s.where("ggml.add_eos_token") + "true, expected an eos_token_id then");
  return {};
}

// ---- tokenizer.json ----

void put_string(std::string& out, std::string_view text) {
  constexpr const char* kHex = "0123456789abcdef";
  out += '"';
  for (const char c : text) {
    const auto u = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      (out += '\\') += c;
    } else if (u < 32) {
      out.append("\\u00").append(1, kHex[u >> 4]).append(1, kHex[u & 15]);
    } else {
      out += c;
    }
  }
  out += '"';
}

// What of tokenizer.json is not a list of tokens or merges.
struct Frame {
  Json normalizer, pre_tokenizer, decoder;
  Json model;  // without vocab and merges
};

Json template_of(const Source& s) {
  Json single = Json::array(), pair = Json::array(), specials = Json::object();
  const auto special = [&](std::size_t id, int type) {
    specials[s.token(id)] = {{"id", s.token(id)}, {"ids", {id}}, {"tokens", {s.token(id)}}};
    return Json{{"SpecialToken", {{"id", s.token(id)}, {"type_id", type}}}};
  };
  const auto sequence = [&](Json& to, const char* name, int type) {
    if (s.add_bos) to.push_back(special(*s.named[kBos], type));
    to.push_back({{"Sequence", {{"id", name}, {"type_id", type}}}});
    if (s.add_eos) to.push_back(special(*s.named[kEos], type));
  };
  sequence(single, "A", 0);
  sequence(pair, "A", 0);
  sequence(pair, "B", 1);
  return {{"type", "TemplateProcessing"},
          {"single", single},
          {"pair", pair},
          {"special_tokens", specials}};
}

void put_added_tokens(std::string& out, const Source& s) {
  const char* separator = "\n";
  for (std::size_t id = 0; id < s.tokens.size(); ++id) {
    if (!s.added(id)) continue;
    out.append(separator)
        .append("    {\"id\": ")
        .append(std::to_string(id))
        .append(", \"content\": ");
    put_string(out, s.tokens[id]);
    out += ", \"single_word\": false, \"lstrip\": false, \"rstrip\": ";
    out += s.phi3 && phi3_strips(s.tokens[id]) ? "true" : "false";
    out += ", \"normalized\": false, \"special\": ";
    out += s.types[id] == TokenType::user_defined ? "false}" : "true}";
    separator = ",\n";
  }
}

void put_vocabulary(std::string& out, const Source& s) {
  const char* separator = "\n";
  for (std::size_t id = 0; id < s.tokens.size(); ++id) {
    if (s.filler(id)) continue;
    out.append(separator).append("      ");
    put_string(out, s.tokens[id]);
    out.append(": ").append(std::to_string(id));
    separator = ",\n";
  }
}

void put_merge(std::string& out, std::string_view left, std::string_view right, bool first) {
  out += first ? "\n      [" : ",\n      [";
  put_string(out, left);
  out += ", ";
  put_string(out, right);
  out += ']';
}

// {"a": 1} without its closing brace, so that more can follow.
std::string open_object(const Json& object) {
  std::string text = object.dump();
  text.pop_back();
  return text;
}

// `put_merges` appends them.
template <class Merges>
Result<TextFile> tokenizer_json(const Source& s, const Frame& shape, std::size_t merge_bytes,
                                Merges&& put_merges) {
  std::size_t room = merge_bytes + 65536;
  for (std::size_t id = 0; id < s.tokens.size(); ++id)
    room += s.tokens[id].size() + 20 + (s.added(id) ? s.tokens[id].size() + 130 : 0);
  if (room > kMostWrittenBytes)
    return invalid(s.where("ggml.tokens") + "tokenizer.json would have " + std::to_string(room) +
                   " bytes, expected at most " + std::to_string(kMostWrittenBytes));
  TextFile json{"tokenizer.json", {}};
  std::string& out = json.text;
  out.reserve(room);
  out += "{\n  \"version\": \"1.0\",\n  \"truncation\": null,\n  \"padding\": null,\n";
  out += "  \"added_tokens\": [";
  put_added_tokens(out, s);
  out += "],\n  \"normalizer\": " + shape.normalizer.dump();
  out += ",\n  \"pre_tokenizer\": " + shape.pre_tokenizer.dump();
  out += ",\n  \"post_processor\": " + template_of(s).dump();
  out += ",\n  \"decoder\": " + shape.decoder.dump();
  out += ",\n  \"model\": " + open_object(shape.model) + ",\n    \"vocab\": {";
  put_vocabulary(out, s);
  out += "\n    },\n    \"merges\": [";
  BITTERN_TRY(put_merges(out));
  out += "\n    ]\n  }\n}\n";
  return json;
}

Json bpe_model(const Json& unk, bool byte_fallback, bool ignore_merges) {
  return {{"type", "BPE"},
          {"dropout", nullptr},
          {"unk_token", unk},
          {"continuing_subword_prefix", nullptr},
          {"end_of_word_suffix", nullptr},
          {"fuse_unk", byte_fallback},
          {"byte_fallback", byte_fallback},
          {"ignore_merges", ignore_merges}};
}

Json byte_level() {
  return {{"type", "ByteLevel"},
          {"add_prefix_space", false},
          {"trim_offsets", true},
          {"use_regex", false}};
}

// ---- byte-level BPE ----

Result<const PreTokenizer*> pre_tokenizer_of(const Source& s) {
  std::string_view name = "default";
  if (s.file.find("tokenizer.ggml.pre") != nullptr) {
    const auto value = s.file.string("tokenizer.ggml.pre");
    if (!value) return value.status();
    name = *value;
  }
  if (const PreTokenizer* row = find_pre_tokenizer(name)) return row;
  return unsupported(s.where("ggml.pre") + in_quotes(name) + ", expected one of " +
                     pre_tokenizer_names());
}

// Merges as they lie in the file: "left right", cut at the first space that leaves a left part.
Status put_file_merges(const Source& s, const GgufValue& merges, std::string& out) {
  const std::string where = s.where("ggml.merges");
  Status status;
  std::size_t i = 0;
  std::string joined;
  merges.each([&](const GgufValue& value) {
    if (!status.ok()) return;
    const std::string_view merge = *value.as_string();
    const auto refuse = [&](const std::string& why) {
      status = invalid(where + "merge " + std::to_string(i) + ", " + in_quotes(merge) + ": " + why);
    };
    const std::size_t space = merge.size() > 1 ? merge.find(' ', 1) : merge.npos;
    if (space == merge.npos) return refuse("no space, expected two tokens");
    const std::string_view left = merge.substr(0, space), right = merge.substr(space + 1);
    joined.assign(left).append(right);
    for (const std::string_view part : {left, right, std::string_view(joined)}) {
      if (s.index.find(s.tokens, part) < 0)
        return refuse(in_quotes(part) + " is no token, expected one");
    }
    put_merge(out, left, right, i == 0);
    ++i;
  });
  return status;
}

Result<TextFile> byte_level_tokenizer(Source& s) {
  const auto pre = pre_tokenizer_of(s);
  if (!pre) return pre.status();
  const PreTokenizer& row = **pre;
  s.add_bos = row.add_bos;
  BITTERN_TRY(read_specials(s));
  const auto merges = s.file.array("tokenizer.ggml.merges");
  if (!merges) return merges.status();
  if (merges->element() != GgufType::string || merges->size() > kMostMerges)
    return invalid(s.where("ggml.merges") + std::to_string(merges->size()) + " of type " +
                   name(merges->element()) + ", expected at most " + std::to_string(kMostMerges) +
                   " strings");

  Json steps = Json::array();
  for (const std::string& cut : row.cuts) {
    steps.push_back({{"type", "Split"},
                     {"pattern", {{"Regex", cut}}},
                     {"behavior", "Isolated"},
                     {"invert", false}});
  }
  steps.push_back(byte_level());
  const Frame shape{
      .normalizer = row.nfc ? Json{{"type", "NFC"}} : Json(),
      .pre_tokenizer = {{"type", "Sequence"}, {"pretokenizers", steps}},
      .decoder = byte_level(),
      .model = bpe_model(nullptr, false, row.ignore_merges),
  };
  const std::size_t merge_bytes = merges->encoded().size() + 12 * merges->size();
  return tokenizer_json(s, shape, merge_bytes,
                        [&](std::string& out) { return put_file_merges(s, *merges, out); });
}

// ---- sentencepiece's BPE ----

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

// llama.cpp joins the two neighbours whose token has the highest score, the leftmost first among
// equals; tokenizer.json, the two whose merge comes first. Both agree where no two tokens that are
// joined have one score, and for runs of one letter that have, see repeated_letter. Tokens found in
// the text beforehand are never joined.
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

Result<TextFile> sentencepiece_tokenizer(Source& s) {
  // llama.cpp's defaults.
  s.add_bos = true;
  for (const auto& [which, id] :
       {std::pair{kBos, std::size_t{1}}, {kEos, std::size_t{2}}, {kUnk, std::size_t{0}}}) {
    if (id < s.tokens.size()) s.named[which] = id;
  }
  bool add_space_prefix = true;
  BITTERN_TRY(read_specials(s));
  BITTERN_TRY(read_flag(s, "add_space_prefix", add_space_prefix));
  std::vector<float> scores;
  BITTERN_TRY(read_scores(s, scores));
  for (int byte = 0; byte < 256; ++byte) {
    if (s.index.find(s.tokens, byte_token(byte)) < 0)
      return unsupported(s.where("ggml.tokens") + "lacks " + in_quotes(byte_token(byte)) +
                         ", expected a token for every byte");
  }
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

// ---- the small files ----

// A template, or several of them with names.
Result<Json> chat_template_of(const Source& s) {
  const auto text = [&](const std::string& key) -> Result<std::string> {
    const auto value = s.file.string(key);
    if (!value) return value.status();
    if (!is_utf8(*value))
      return invalid(s.file.path() + ": " + key + ": not UTF-8, expected UTF-8");
    return std::string(*value);
  };
  Json templates = Json::array();
  if (s.file.find("tokenizer.chat_template") != nullptr) {
    auto value = text("tokenizer.chat_template");
    if (!value) return value.status();
    templates.push_back({{"name", "default"}, {"template", std::move(*value)}});
  }
  if (s.file.find("tokenizer.chat_templates") != nullptr) {
    const auto names = s.file.strings("tokenizer.chat_templates");
    if (!names) return names.status();
    for (const std::string_view name : *names) {
      auto value = text("tokenizer.chat_template." + std::string(name));
      if (!value) return value.status();
      templates.push_back({{"name", std::string(name)}, {"template", std::move(*value)}});
    }
  }
  if (templates.size() == 1 && templates[0]["name"] == "default") return templates[0]["template"];
  return templates;
}

void put_named_tokens(Json& to, const Source& s) {
  for (std::size_t i = 0; i < s.named.size(); ++i) {
    if (s.named[i]) to[std::string(kNamedTokens[i].hf) + "_token"] = s.token(*s.named[i]);
  }
}

Result<TextFile> tokenizer_config(const Source& s) {
  Json config = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                 {"add_bos_token", s.add_bos},
                 {"add_eos_token", s.add_eos},
                 {"clean_up_tokenization_spaces", false}};
  put_named_tokens(config, s);
  const auto architecture = s.file.string("general.architecture");
  if (architecture) {
    const std::string key = std::string(*architecture) + ".context_length";
    if (s.file.find(key) != nullptr) {
      const auto length = s.file.uint(key);
      if (!length) return length.status();
      config["model_max_length"] = *length;
    }
  }
  auto chat = chat_template_of(s);
  if (!chat) return chat.status();
  if (!chat->empty()) config["chat_template"] = std::move(*chat);
  return TextFile{"tokenizer_config.json", config.dump(2) + "\n"};
}

TextFile special_tokens_map(const Source& s) {
  Json map = Json::object();
  put_named_tokens(map, s);
  return {"special_tokens_map.json", map.dump(2) + "\n"};
}

// Generation ends with any of eos, eot and eom.
TextFile generation_config(const Source& s) {
  Json config = Json::object();
  if (s.named[kBos]) config["bos_token_id"] = *s.named[kBos];
  Json ends = Json::array();
  for (const auto& id : {s.named[kEos], s.eot, s.eom}) {
    if (id && std::find(ends.begin(), ends.end(), *id) == ends.end()) ends.push_back(*id);
  }
  if (!ends.empty()) config["eos_token_id"] = ends.size() == 1 ? ends[0] : ends;
  if (s.named[kPad]) config["pad_token_id"] = *s.named[kPad];
  return {"generation_config.json", config.dump(2) + "\n"};
}

Status read_name(Source& s) {
  const auto name = s.file.string("general.name");
  s.phi3 = name && named_phi3(*name);
  if (!s.phi3) return {};
  for (const char* token : kPhi3Tokens)
    if (s.index.find(s.tokens, token) < 0)
      return unsupported(s.file.path() + ": general.name: " + in_quotes(*name) +
                         ": llama.cpp looks for the token " + in_quotes(token) +
                         " in models of this name, expected it");
  return {};
}

Result<std::vector<TextFile>> convert(const GgufFile& file) {
  Source s(file);
  const auto model = file.string("tokenizer.ggml.model");
  if (!model) return model.status();
  BITTERN_TRY(read_tokens(s));
  BITTERN_TRY(read_types(s));
  BITTERN_TRY(read_name(s));
  if (*model != "gpt2" && *model != "llama")
    return unsupported(s.where("ggml.model") + in_quotes(*model) + ", expected gpt2 or llama");
  auto json = *model == "gpt2" ? byte_level_tokenizer(s) : sentencepiece_tokenizer(s);
  if (!json) return json.status();
  auto config = tokenizer_config(s);
  if (!config) return config.status();
  std::vector<TextFile> files;
  files.push_back(std::move(*json));
  files.push_back(std::move(*config));
  files.push_back(special_tokens_map(s));
  files.push_back(generation_config(s));
  return files;
}

}  // namespace

Result<std::vector<TextFile>> tokenizer_from_gguf(const GgufFile& file) {
  try {
    return convert(file);
  } catch (const std::bad_alloc&) {
    return Status(Code::out_of_memory, file.path() + ": tokenizer");
  }
}

}  // namespace bittern
