// How text is split and normalised before it becomes tokens, and the tokens and templates around
// it.
#include <algorithm>

#include "convert/tokenizer_parts.h"
#include "core/guarded.h"
#include "formats/json_events.h"
#include "formats/mapped_file.h"
#include "formats/side_file.h"

namespace bittern::tokenizer_detail {

const Json* member(const Json& object, const char* key) {
  if (!object.is_object()) return nullptr;
  const auto it = object.find(key);
  return it == object.end() || it->is_null() ? nullptr : &*it;
}
std::string text_member(const Json& object, const char* key) {
  const Json* value = member(object, key);
  return value != nullptr && value->is_string() ? value->get<std::string>() : std::string();
}
bool true_member(const Json& object, const char* key, bool otherwise) {
  const Json* value = member(object, key);
  return value == nullptr ? otherwise : value->is_boolean() && value->get<bool>();
}

Status flatten(const Json* node, const char* list, std::vector<const Json*>& steps, int depth) {
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

namespace {

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

}  // namespace

Result<Cutting> cutting_of(const Json& json, const std::string& path) {
  const std::string where = path + ": pre_tokenizer: ";
  std::vector<const Json*> steps;
  if (const Status status = flatten(member(json, "pre_tokenizer"), "pretokenizers", steps);
      !status.ok()) {
    throw_if_out_of_memory(status);
    return invalid(where + std::string(status.message()));
  }
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

Result<Normalizing> normalizing_of(const Json& json, const std::string& path) {
  std::vector<const Json*> steps;
  if (const Status status = flatten(member(json, "normalizer"), "normalizers", steps);
      !status.ok()) {
    throw_if_out_of_memory(status);
    return invalid(path + ": normalizer: " + std::string(status.message()));
  }
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
                       " is not a token of the vocabulary");
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

Result<Affixes> affixes_of(const Companions& c, const Json& json, const std::string& path,
                           const Tokens& t, const NamedIds& ids) {
  const std::string where = path + ": post_processor: ";
  std::vector<const Json*> steps;
  if (const Status status = flatten(member(json, "post_processor"), "processors", steps);
      !status.ok()) {
    throw_if_out_of_memory(status);
    return invalid(where + std::string(status.message()));
  }
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

namespace {

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

}  // namespace

Result<std::vector<ChatTemplate>> chat_templates(const Companions& c) {
  std::vector<ChatTemplate> out;
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
    out.push_back({"default", std::string(text)});
    return out;
  }
  const Json* chat = member(c.config, "chat_template");
  if (chat == nullptr) return out;
  const std::string where = c.folder + "/tokenizer_config.json: chat_template: ";
  if (chat->is_string()) {
    out.push_back({"default", chat->get<std::string>()});
    return out;
  }
  if (!chat->is_array()) return invalid(where + "expected a string or a list of named templates");
  for (const Json& entry : *chat) {
    const Json* text = member(entry, "template");
    if (text == nullptr || !text->is_string())
      return invalid(where + "an entry without a template, expected name and template");
    const std::string name = text_member(entry, "name");
    if (std::ranges::find(out, name, &ChatTemplate::name) != out.end())
      return invalid(where + in_quotes(name) + " twice, expected once");
    out.push_back({name, text->get<std::string>()});
  }
  return out;
}

Status put_chat_template(Metadata& out, const Companions& c) {
  const auto templates = chat_templates(c);
  if (!templates) return templates.status();
  std::vector<std::string_view> names;
  for (const ChatTemplate& chat : *templates) {
    BITTERN_TRY(add_template(out, c.folder + "/tokenizer_config.json: chat_template: ", chat.name,
                             chat.text));
    if (chat.name != "default") names.push_back(chat.name);
  }
  if (!names.empty()) out.emplace_back("tokenizer.chat_templates", GgufData::strings(names));
  return {};
}

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

}  // namespace bittern::tokenizer_detail
