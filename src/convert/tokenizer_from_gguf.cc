// The files of a folder's tokeniser from GGUF's metadata.
#include <algorithm>

#include "convert/tokenizer.h"
#include "convert/tokenizer_source.h"
#include "core/guarded.h"
#include "formats/json_events.h"

namespace bittern {

using namespace tokenizer_detail;

namespace {

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

}  // namespace

Status tokenizer_detail::read_flag(const Source& s, const char* name, bool& flag) {
  const std::string key = std::string("tokenizer.ggml.") + name;
  if (s.file.find(key) == nullptr) return {};
  const auto value = s.file.boolean(key);
  if (!value) return value.status();
  flag = *value;
  return {};
}

Status tokenizer_detail::read_specials(Source& s) {
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

// ---- the small files ----

namespace {

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
                         " in models of this name, and there is none");
  return {};
}

Result<std::vector<TextFile>> convert(const GgufFile& file) {
  Source s(file);
  BITTERN_TRY(read_source(s));
  auto json = *file.string("tokenizer.ggml.model") == "gpt2" ? byte_level_tokenizer(s)
                                                             : sentencepiece_tokenizer(s);
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

Status tokenizer_detail::read_source(Source& s) {
  const auto model = s.file.string("tokenizer.ggml.model");
  if (!model) return model.status();
  BITTERN_TRY(read_tokens(s));
  BITTERN_TRY(read_types(s));
  BITTERN_TRY(read_name(s));
  if (*model != "gpt2" && *model != "llama")
    return unsupported(s.where("ggml.model") + in_quotes(*model) + ", expected gpt2 or llama");
  return {};
}

Result<std::vector<TextFile>> tokenizer_from_gguf(const GgufFile& file) {
  try {
    return convert(file);
  } catch (...) {
    return caught(file.path());
  }
}

}  // namespace bittern
