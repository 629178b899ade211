#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <new>
#include <numeric>
#include <optional>

#include "convert/tokenizer.h"
#include "convert/tokenizer_files.h"
#include "convert/tokenizer_table.h"
#include "formats/json_events.h"
#include "formats/mapped_file.h"
#include "formats/side_file.h"

namespace bittern {
namespace {

using Json = nlohmann::ordered_json;
using Metadata = std::vector<std::pair<std::string, GgufData>>;

// What is to be written of the tokens, whatever files it came from.
struct Tokens {
  std::string path;  // of the file the tokens are in
  TextPool pool;
  std::vector<std::string_view> texts;  // by id
  std::vector<TokenType> types;
  std::vector<float> scores;  // or empty
  TokenIndex index{0};

  std::int64_t find(std::string_view text) const { return index.find(texts, text); }
};

const Json* member(const Json& object, const char* key) {
  if (!object.is_object()) return nullptr;
  const auto it = object.find(key);
  return it == object.end() || it->is_null() ? nullptr : &*it;
}
std::string text_member(const Json& object, const char* key) {
  const Json* value = member(object, key);
  return value != nullptr && value->is_string() ? value->get<std::string>() : std::string();
}
bool true_member(const Json& object, const char* key, bool otherwise = false) {
  const Json* value = member(object, key);
  return value == nullptr ? otherwise : value->is_boolean() && value->get<bool>();
}

// ---- tokens ----

// Ids that no token has are filled as llama.cpp's converter does.
struct Slot {
  TextPool::Span text;
  TokenType type = TokenType::unused;
  bool taken = false;
};

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

// llama.cpp looks for tokens of the user's before spaces are marked.
std::string with_spaces(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size();) {
    const bool mark = text.substr(i, 3) == kSpaceMark;
    out += mark ? ' ' : text[i];
    i += mark ? 3 : 1;
  }
  return out;
}

// vocab and added_tokens together. An added token may be in vocab too, under the same id.
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
    if (token.stripped)
      return unsupported(path + ": added_tokens: " + in_quotes(token.content) +
                         " takes the spaces around it or stands alone only, which GGUF cannot say");
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

struct MergeIds {
  std::uint32_t left, right, joined;
};

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
                       " is no token, expected one");
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

// ---- how text is cut ----

// Every step of a Sequence, of Sequences too.
Status flatten(const Json* node, const char* list, std::vector<const Json*>& steps, int depth = 0) {
  if (node == nullptr) return {};
  if (text_member(*node, "type") != "Sequence") {
    steps.push_back(node);
    return {};
  }
  const Json* members = member(*node, list);
  if (members == nullptr || !members->is_array() || depth > 8)
    return invalid(std::string("a Sequence without ") + list);
  for (const Json& step : *members) BITTERN_TRY(flatten(&step, list, steps, depth + 1));
  return {};
}

// What regular expressions may spell either way.
std::string canonical(std::string_view regex) {
  std::string out;
  for (const char c : regex) {
    if (c == '\r') {
      out += "\\r";
    } else if (c == '\n') {
      out += "\\n";
    } else {
      out += c;
    }
  }
  return out;
}

struct Cutting {
  bool byte_level = false;
  std::vector<std::string> cuts;
  std::optional<std::string> metaspace;  // its prepend_scheme
};

Result<Cutting> cutting_of(const Json& json, const std::string& path) {
  const std::string where = path + ": pre_tokenizer: ";
  std::vector<const Json*> steps;
  if (const Status status = flatten(member(json, "pre_tokenizer"), "pretokenizers", steps);
      !status.ok())
    return invalid(where + std::string(status.message()));
  Cutting out;
  for (const Json* step : steps) {
    const std::string type = text_member(*step, "type");
    const auto refuse = [&](const std::string& why) {
      return unsupported(where + type + ": " + why);
    };
    if (out.byte_level) return refuse("after ByteLevel, expected it last");
    if (type == "Split") {
      const Json* pattern = member(*step, "pattern");
      const std::string regex = pattern == nullptr ? "" : text_member(*pattern, "Regex");
      const std::string behaviour = text_member(*step, "behavior");
      const bool invert = true_member(*step, "invert");
      if (pattern != nullptr && text_member(*pattern, "String") == " ") {
        out.cuts.push_back(" ");  // of no effect where spaces are marked before
      } else if (!regex.empty() && (invert ? behaviour == "Removed" : behaviour == "Isolated")) {
        out.cuts.push_back(canonical(regex));
      } else {
        return refuse("expected a Regex, Isolated");
      }
    } else if (type == "Digits") {
      out.cuts.push_back(true_member(*step, "individual_digits") ? kDigitCut : kDigitsCut);
    } else if (type == "Punctuation" && text_member(*step, "behavior") == "Contiguous") {
      out.cuts.push_back(kPunctuationCut);
    } else if (type == "ByteLevel") {
      if (true_member(*step, "add_prefix_space"))
        return refuse("add_prefix_space true, which GGUF cannot say");
      if (true_member(*step, "use_regex", true)) out.cuts.push_back(kByteLevelCut);
      out.byte_level = true;
    } else if (type == "Metaspace") {
      if (true_member(*step, "split", true)) return refuse("split true, expected false");
      std::string scheme = text_member(*step, "prepend_scheme");
      if (scheme.empty())
        scheme = true_member(*step, "add_prefix_space", true) ? "always" : "never";
      out.metaspace = scheme;
    } else {
      return refuse("expected Split, Digits, Punctuation, ByteLevel or Metaspace");
    }
  }
  return out;
}

struct Normalizing {
  bool nfc = false, marks_spaces = false, prepends = false;
};

Result<Normalizing> normalizing_of(const Json& json, const std::string& path) {
  std::vector<const Json*> steps;
  if (const Status status = flatten(member(json, "normalizer"), "normalizers", steps); !status.ok())
    return invalid(path + ": normalizer: " + std::string(status.message()));
  Normalizing out;
  for (const Json* step : steps) {
    const std::string type = text_member(*step, "type");
    const Json* pattern = member(*step, "pattern");
    if (type == "NFC") {
      out.nfc = true;
    } else if (type == "Prepend" && text_member(*step, "prepend") == kSpaceMark) {
      out.prepends = true;
    } else if (type == "Replace" && pattern != nullptr && text_member(*pattern, "String") == " " &&
               text_member(*step, "content") == kSpaceMark) {
      out.marks_spaces = true;
    } else {
      return unsupported(path + ": normalizer: " + type +
                         ", which GGUF cannot say: expected none, NFC, or spaces marked by U+2581");
    }
  }
  return out;
}

// ---- special ids, flags and templates ----

struct Companions {
  std::string folder;
  Json config, map, model;  // tokenizer_config.json, special_tokens_map.json, config.json
};

Result<Companions> read_companions(const std::string& folder) {
  Companions c;
  c.folder = folder;
  for (const auto& [name, tree] :
       {std::pair<const char*, Json*>{"tokenizer_config.json", &c.config},
        {"special_tokens_map.json", &c.map},
        {"config.json", &c.model}}) {
    auto read = read_json_file(folder + "/" + name);
    if (!read) return read.status();
    *tree = std::move(*read);
  }
  return c;
}

using NamedIds = std::array<std::optional<std::uint32_t>, std::size(kNamedTokens)>;

// By text in the tokeniser's files, else by id in the model's.
Result<NamedIds> named_ids(const Companions& c, const Tokens& t) {
  NamedIds ids;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const std::string key = std::string(kNamedTokens[i].hf) + "_token";
    for (const auto& [tree, name] : {std::pair{&c.config, "/tokenizer_config.json: "},
                                     std::pair{&c.map, "/special_tokens_map.json: "}}) {
      const Json* value = member(*tree, key.c_str());
      if (value == nullptr || ids[i]) continue;
      const std::string text =
          value->is_string() ? value->get<std::string>() : text_member(*value, "content");
      const std::int64_t id = t.find(text);
      if (id < 0)
        return invalid(c.folder + name + key + ": " + in_quotes(text) +
                       " is no token, expected one");
      ids[i] = static_cast<std::uint32_t>(id);
    }
    if (ids[i]) continue;
    const Json* value = member(c.model, (key + "_id").c_str());
    if (value != nullptr && value->is_array() && !value->empty()) value = &(*value)[0];
    if (value == nullptr) continue;
    if (!value->is_number_unsigned()) continue;  // -1 is none
    if (value->get<std::uint64_t>() >= t.texts.size())
      return invalid(c.folder + "/config.json: " + key + "_id: " + value->dump() +
                     ", expected less than the " + std::to_string(t.texts.size()) + " tokens");
    ids[i] = value->get<std::uint32_t>();
  }
  return ids;
}

struct Affixes {
  bool bos = false, eos = false;
};

// What is put around the text: tokenizer.json's post_processor decides, as it does for
// transformers; tokenizer_config.json only where there is none.
Result<Affixes> affixes_of(const Companions& c, const Json& json, const std::string& path,
                           const Tokens& t, const NamedIds& ids) {
  const std::string where = path + ": post_processor: ";
  std::vector<const Json*> steps;
  if (const Status status = flatten(member(json, "post_processor"), "processors", steps);
      !status.ok())
    return invalid(where + std::string(status.message()));
  if (steps.empty())
    return Affixes{ids[kBos] && true_member(c.config, "add_bos_token"),
                   ids[kEos] && true_member(c.config, "add_eos_token")};
  Affixes out;
  for (const Json* step : steps) {
    const std::string type = text_member(*step, "type");
    if (type == "ByteLevel") continue;
    const Json* single = member(*step, "single");
    if (type != "TemplateProcessing" || single == nullptr || !single->is_array())
      return unsupported(where + type + ", expected ByteLevel or TemplateProcessing");
    bool text_seen = false;
    for (const Json& part : *single) {
      const Json* special = member(part, "SpecialToken");
      if (special == nullptr) {
        text_seen = true;
        continue;
      }
      const std::string token = text_member(*special, "id");
      const auto& id = ids[text_seen ? kEos : kBos];
      bool& put = text_seen ? out.eos : out.bos;
      if (!id || t.texts[*id] != token || put)
        return unsupported(where + "puts " + in_quotes(token) + (text_seen ? " after" : " before") +
                           " the text, expected one " + (text_seen ? "eos" : "bos") +
                           "_token at most, which is all GGUF can say");
      put = true;
    }
  }
  return out;
}

Status add_template(Metadata& out, const std::string& where, const std::string& name,
                    const std::string& text) {
  if (name == "default") {
    out.emplace_back("tokenizer.chat_template", GgufData(text));
    return {};
  }
  const bool plain = !name.empty() && std::ranges::all_of(name, [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
  });
  if (!plain)
    return invalid(where + "a template called " + in_quotes(name) +
                   ", expected letters, digits and _");
  out.emplace_back("tokenizer.chat_template." + name, GgufData(text));
  return {};
}

Status put_chat_template(Metadata& out, const Companions& c) {
  const std::string path = c.folder + "/chat_template.jinja";
  if (is_there(path)) {
    BITTERN_TRY(check_side_file(path));
    const auto file = MappedFile::open(path);
    if (!file) return file.status();
    const std::string_view text(reinterpret_cast<const char*>(file->bytes().data()),
                                file->bytes().size());
    if (text.size() > kMostTokenizerBytes || !is_utf8(text))
      return invalid(path + ": expected UTF-8 text of at most " +
                     std::to_string(kMostTokenizerBytes) + " bytes");
    out.emplace_back("tokenizer.chat_template", GgufData(text));
    return {};
  }
  const Json* chat = member(c.config, "chat_template");
  if (chat == nullptr) return {};
  const std::string where = c.folder + "/tokenizer_config.json: chat_template: ";
  if (chat->is_string()) return add_template(out, where, "default", chat->get<std::string>());
  if (!chat->is_array()) return invalid(where + "expected a string or a list of named templates");
  std::vector<std::string> names;
  for (const Json& entry : *chat) {
    const Json* text = member(entry, "template");
    if (text == nullptr || !text->is_string())
      return invalid(where + "an entry without a template, expected name and template");
    const std::string name = text_member(entry, "name");
    if (std::ranges::find(names, name) != names.end())
      return invalid(where + in_quotes(name) + " twice, expected once");
    BITTERN_TRY(add_template(out, where, name, text->get<std::string>()));
    names.push_back(name);
  }
  std::erase(names, "default");
  const std::vector<std::string_view> views(names.begin(), names.end());
  if (!views.empty()) out.emplace_back("tokenizer.chat_templates", GgufData::strings(views));
  return {};
}

// ---- both kinds ----

void put_tokens(Metadata& out, const Tokens& t, const char* model, const char* pre) {
  out.emplace_back("tokenizer.ggml.model", GgufData(model));
  out.emplace_back("tokenizer.ggml.pre", GgufData(pre));
  out.emplace_back("tokenizer.ggml.tokens", GgufData::strings(t.texts));
  if (!t.scores.empty())
    out.emplace_back("tokenizer.ggml.scores", GgufData::array(std::span<const float>(t.scores)));
  std::vector<std::int32_t> types(t.types.size());
  std::ranges::transform(t.types, types.begin(),
                         [](TokenType type) { return static_cast<std::int32_t>(type); });
  out.emplace_back("tokenizer.ggml.token_type",
                   GgufData::array(std::span<const std::int32_t>(types)));
}

void put_ids(Metadata& out, const NamedIds& ids, const Affixes& affixes) {
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i])
      out.emplace_back(std::string("tokenizer.ggml.") + kNamedTokens[i].gguf + "_token_id",
                       GgufData(*ids[i]));
  }
  out.emplace_back("tokenizer.ggml.add_bos_token", GgufData(affixes.bos));
  out.emplace_back("tokenizer.ggml.add_eos_token", GgufData(affixes.eos));
}

// ---- byte-level BPE ----

Status put_merges(Metadata& out, const Tokens& t, std::span<const MergeIds> merges) {
  TextPool pool;
  std::vector<TextPool::Span> spans;
  spans.reserve(merges.size());
  std::string text;
  for (const MergeIds& merge : merges) {
    const std::string_view left = t.texts[merge.left], right = t.texts[merge.right];
    if (left.find(' ') != left.npos || right.find(' ') != right.npos)
      return unsupported(t.path + ": model.merges: merge " + std::to_string(spans.size()) + ", " +
                         in_quotes(left) + " " + in_quotes(right) +
                         ": a token with a space, which GGUF's merges cannot have");
    text.assign(left).append(1, ' ').append(right);
    spans.push_back(pool.add(text));
  }
  std::vector<std::string_view> views;
  views.reserve(spans.size());
  for (const TextPool::Span span : spans) views.push_back(pool.view(span));
  out.emplace_back("tokenizer.ggml.merges", GgufData::strings(views));
  return {};
}

std::string shown_cuts(std::span<const std::string> cuts) {
  std::string text;
  for (const std::string& cut : cuts) text += (text.empty() ? "" : ", then ") + in_quotes(cut);
  return text.empty() ? "nothing" : text;
}

Result<Metadata> from_byte_level(TokenizerJson& json, const std::string& path, const Companions& c,
                                 const Cutting& cutting, std::int64_t vocab_size) {
  const Json& model = json.rest["model"];
  const auto normalizing = normalizing_of(json.rest, path);
  if (!normalizing) return normalizing.status();
  if (normalizing->marks_spaces || normalizing->prepends)
    return unsupported(path +
                       ": normalizer: spaces are marked before ByteLevel, expected none or NFC");
  const bool ignore_merges = true_member(model, "ignore_merges");
  const PreTokenizer* row = find_pre_tokenizer(cutting.cuts, ignore_merges, normalizing->nfc);
  if (row == nullptr)
    return unsupported(path + ": pre_tokenizer: cuts by " + shown_cuts(cutting.cuts) +
                       (ignore_merges ? ", ignoring merges" : "") +
                       ", expected what llama.cpp knows as one of " + pre_tokenizer_names());
  const auto tokens = gather(json, path, vocab_size, false);
  if (!tokens) return tokens.status();
  const auto merges = merge_ids(json, *tokens, false);
  if (!merges) return merges.status();
  const auto ids = named_ids(c, *tokens);
  if (!ids) return ids.status();

  const auto affixes = affixes_of(c, json.rest, path, *tokens, *ids);
  if (!affixes) return affixes.status();
  const std::string_view names = row->names;
  Metadata out;
  put_tokens(out, *tokens, "gpt2", std::string(names.substr(0, names.find(' '))).c_str());
  BITTERN_TRY(put_merges(out, *tokens, *merges));
  put_ids(out, *ids, *affixes);
  BITTERN_TRY(put_chat_template(out, c));
  return out;
}

// ---- sentencepiece's BPE ----

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

// Scores that make llama.cpp join what the merges would, or why there are none. It joins any two
// neighbours that make a token, so every such pair must be a merge; it ranks tokens, not pairs, so
// a token's merges must follow each other, but for runs of one letter, see repeated_letter.
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

Status check_model(const Json& rest, const std::string& path) {
  const Json* model = member(rest, "model");
  if (model == nullptr) return invalid(path + ": model: not there, expected an object");
  // Files of old have no type: theirs is BPE where there are merges.
  const std::string type = text_member(*model, "type");
  if (type != "BPE" && !type.empty())
    return unsupported(path + ": model.type: " + in_quotes(type) + ", expected BPE");
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const Json* value = member(*model, key);
    if (value != nullptr && *value != "")
      return unsupported(path + ": model." + key + ": " + value->dump() +
                         ", which GGUF cannot say");
  }
  return {};
}

// Tokens that take the spaces after them must be those llama.cpp lets do so in a Phi-3.
Status check_strips(const TokenizerJson& json, const std::string& path, bool* like_phi3) {
  const auto strips = [](const AddedToken& token) { return token.rstrip; };
  const auto first = std::find_if(json.added.begin(), json.added.end(), strips);
  if (first == json.added.end()) return {};
  const auto is_phi3 = [&] {
    for (const char* text : kPhi3Tokens)
      if (std::none_of(json.added.begin(), json.added.end(),
                       [&](const AddedToken& token) { return token.content == text; }))
        return false;
    return std::all_of(json.added.begin(), json.added.end(), [](const AddedToken& token) {
      return token.rstrip == phi3_strips(token.content);
    });
  };
  if (like_phi3 == nullptr || !is_phi3())
    return unsupported(path + ": added_tokens: " + in_quotes(first->content) +
                       " takes the spaces around it or stands alone only, which GGUF cannot say");
  *like_phi3 = true;
  return {};
}

Result<Metadata> from_json(const std::string& folder, std::int64_t vocab_size, bool* like_phi3) {
  const std::string path = folder + "/tokenizer.json";
  auto json = read_tokenizer_json(path);
  if (!json) return json.status();
  BITTERN_TRY(check_model(json->rest, path));
  BITTERN_TRY(check_strips(*json, path, like_phi3));
  const auto companions = read_companions(folder);
  if (!companions) return companions.status();
  const auto cutting = cutting_of(json->rest, path);
  if (!cutting) return cutting.status();
  if (cutting->byte_level) return from_byte_level(*json, path, *companions, *cutting, vocab_size);
  return from_sentencepiece_json(*json, path, *companions, *cutting, vocab_size);
}

// ---- tokenizer.model ----

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

}  // namespace

Result<Metadata> tokenizer_to_gguf(const std::string& folder, std::int64_t vocab_size,
                                   bool* like_phi3) {
  try {
    if (!is_there(folder + "/tokenizer.json") && is_there(folder + "/tokenizer.model"))
      return from_sentencepiece_model(folder, vocab_size);
    return from_json(folder, vocab_size, like_phi3);
  } catch (const std::bad_alloc&) {
    return Status(Code::out_of_memory, folder + ": tokenizer");
  }
}

}  // namespace bittern
