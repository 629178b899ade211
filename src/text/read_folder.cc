// The tokeniser of a Hugging Face or MLX folder: tokenizer.json as the package `tokenizers` reads
// it, or tokenizer.model, sentencepiece's own file.
#include <algorithm>

#include "convert/tokenizer_files.h"
#include "convert/tokenizer_parts.h"
#include "formats/json_events.h"
#include "formats/side_file.h"
#include "text/tables.h"

namespace bittern::text {
namespace {

using tokenizer_detail::flatten;
using tokenizer_detail::Json;
using tokenizer_detail::member;
using tokenizer_detail::text_member;
using tokenizer_detail::true_member;

// ---- the parts of tokenizer.json ----

// Calls f(step, its type) for each step of one part of tokenizer.json.
template <class F>
Status each_step(const Json& json, const std::string& path, const char* part, const char* list,
                 F&& f) {
  std::vector<const Json*> steps;
  if (const Status status = flatten(member(json, part), list, steps); !status.ok())
    return invalid(path + ": " + part + ": " + std::string(status.message()));
  for (const Json* step : steps) BITTERN_TRY(f(*step, text_member(*step, "type")));
  return {};
}

Status read_normalizers(const Json& json, TokenizerTables& t) {
  using Kind = Normalizer::Kind;
  return each_step(
      json, t.path, "normalizer", "normalizers",
      [&](const Json& step, const std::string& type) -> Status {
        const Json* pattern = member(step, "pattern");
        for (const auto& [name, kind] : {std::pair{"NFC", Kind::nfc},
                                         {"NFD", Kind::nfd},
                                         {"NFKC", Kind::nfkc},
                                         {"NFKD", Kind::nfkd}}) {
          if (type != name) continue;
          t.normalizers.push_back({kind});
          return {};
        }
        if (type == "Prepend") {
          t.normalizers.push_back({Kind::prepend, "", text_member(step, "prepend")});
        } else if (type == "Replace" && pattern != nullptr &&
                   !text_member(*pattern, "String").empty()) {
          t.normalizers.push_back(
              {Kind::replace, text_member(*pattern, "String"), text_member(step, "content")});
        } else {
          return unsupported(t.where("normalizer") + type +
                             ", expected NFC, NFD, NFKC, NFKD, Prepend or Replace of a String");
        }
        return {};
      });
}

Result<Behaviour> behaviour_of(const std::string& where, const std::string& name) {
  for (const auto& [known, behaviour] : {std::pair{"Isolated", Behaviour::isolated},
                                         {"Removed", Behaviour::removed},
                                         {"MergedWithPrevious", Behaviour::merged_with_previous},
                                         {"MergedWithNext", Behaviour::merged_with_next},
                                         {"Contiguous", Behaviour::contiguous}})
    if (name == known) return behaviour;
  return unsupported(where + "behavior " + in_quotes(name) +
                     ", expected Isolated, Removed, MergedWithPrevious, MergedWithNext or "
                     "Contiguous");
}

Status read_pre_tokenizers(const Json& json, TokenizerTables& t) {
  bool byte_level = false, metaspace = false;
  const Status status = each_step(
      json, t.path, "pre_tokenizer", "pretokenizers",
      [&](const Json& step, const std::string& type) -> Status {
        const std::string where = t.where("pre_tokenizer") + type + ": ";
        const auto add = [&](const Cut& cut) {
          return t.cutter.add(t.where("pre_tokenizer") + in_quotes(cut.pattern), cut);
        };
        if (byte_level || metaspace)
          return unsupported(where + "after ByteLevel or Metaspace, expected it before");
        if (type == "Split") {
          const Json* pattern = member(step, "pattern");
          Cut cut;
          if (pattern != nullptr) cut.pattern = text_member(*pattern, "Regex");
          cut.regex = !cut.pattern.empty();
          if (pattern != nullptr && !cut.regex) cut.pattern = text_member(*pattern, "String");
          auto behaviour = behaviour_of(where, text_member(step, "behavior"));
          if (!behaviour) return behaviour.status();
          cut.behaviour = *behaviour;
          cut.invert = true_member(step, "invert");
          return add(cut);
        }
        if (type == "Digits")
          return add({.pattern = true_member(step, "individual_digits") ? kDigitCut : kDigitsCut});
        if (type == "Punctuation") {
          const std::string behaviour_name = text_member(step, "behavior");
          auto behaviour =
              behaviour_of(where, behaviour_name.empty() ? "Isolated" : behaviour_name);
          if (!behaviour) return behaviour.status();
          return add({.pattern = "[\\p{P}\\$\\+<=>\\^~\\|`]", .behaviour = *behaviour});
        }
        if (type == "ByteLevel") {
          byte_level = true;
          if (true_member(step, "add_prefix_space", true))
            return unsupported(where + "add_prefix_space true, expected false");
          if (true_member(step, "use_regex", true)) return add({.pattern = kByteLevelCut});
          return {};
        }
        if (type == "Metaspace") {
          metaspace = t.marks_spaces = t.prefix_unless_space = true;
          std::string scheme = text_member(step, "prepend_scheme");
          if (scheme.empty())
            scheme = true_member(step, "add_prefix_space", true) ? "always" : "never";
          const std::string mark = text_member(step, "replacement");
          if (!mark.empty() && mark != kSpaceMark)
            return unsupported(where + "replacement " + in_quotes(mark) + ", expected U+2581");
          if (true_member(step, "split", true))
            BITTERN_TRY(add(
                {.pattern = kSpaceMark, .regex = false, .behaviour = Behaviour::merged_with_next}));
          t.space_prefix = scheme == "always"  ? SpacePrefix::always
                           : scheme == "first" ? SpacePrefix::first
                                               : SpacePrefix::never;
          return {};
        }
        return unsupported(t.where("pre_tokenizer") + in_quotes(type) +
                           ", expected Split, Digits, Punctuation, ByteLevel or Metaspace");
      });
  if (!status.ok()) return status;
  t.kind = byte_level ? TokenizerTables::Kind::byte_level : TokenizerTables::Kind::merges;
  return {};
}

Status read_decoder(const Json& json, TokenizerTables& t) {
  const bool bytes = t.kind == TokenizerTables::Kind::byte_level;
  return each_step(json, t.path, "decoder", "decoders",
                   [&](const Json& step, const std::string& type) -> Status {
                     if (bytes && type == "ByteLevel") return {};
                     if (!bytes && (type == "Replace" || type == "ByteFallback" || type == "Fuse"))
                       return {};
                     if (!bytes && type == "Strip") {
                       const Json *start = member(step, "start"), *stop = member(step, "stop");
                       t.strip_first_space = start != nullptr && *start == 1;
                       if (text_member(step, "content") == " " && (stop == nullptr || *stop == 0))
                         return {};
                     }
                     if (!bytes && type == "Metaspace") {
                       t.strip_first_space = t.space_prefix != SpacePrefix::never;
                       return {};
                     }
                     return unsupported(
                         t.where("decoder") + in_quotes(type) + ", expected " +
                         (bytes ? "ByteLevel" : "Replace, ByteFallback, Fuse, Strip or Metaspace"));
                   });
}

// The tokens that are put around the text.
Status read_post_processor(const Json& json, TokenizerTables& t) {
  return each_step(
      json, t.path, "post_processor", "processors",
      [&](const Json& step, const std::string& type) -> Status {
        if (type == "ByteLevel") return {};
        const std::string where = t.where("post_processor");
        const Json *single = member(step, "single"), *specials = member(step, "special_tokens");
        if (type != "TemplateProcessing" || single == nullptr || !single->is_array())
          return unsupported(where + in_quotes(type) +
                             ", expected ByteLevel or TemplateProcessing");
        bool text_seen = false;
        for (const Json& part : *single) {
          const Json* token = member(part, "SpecialToken");
          if (token == nullptr) {
            text_seen = true;
            continue;
          }
          const std::string name = text_member(*token, "id");
          const Json* entry = specials != nullptr ? member(*specials, name.c_str()) : nullptr;
          const Json* ids = entry != nullptr ? member(*entry, "ids") : nullptr;
          if (ids == nullptr || !ids->is_array())
            return invalid(where + "special_tokens: " + in_quotes(name) + " has no ids");
          for (const Json& id : *ids) {
            if (!id.is_number_unsigned() || id.get<std::uint64_t>() >= t.texts.size())
              return invalid(where + "special_tokens: " + in_quotes(name) +
                             ": expected ids below " + std::to_string(t.texts.size()));
            (text_seen ? t.after : t.before).push_back(id.get<std::int32_t>());
          }
        }
        return {};
      });
}

// ---- tokens ----

Status read_tokens(TokenizerJson& json, TokenizerTables& t) {
  std::size_t size = 0;
  for (const auto& entry : json.vocabulary) size = std::max<std::size_t>(size, entry.id + 1);
  for (const AddedToken& token : json.added) size = std::max<std::size_t>(size, token.id + 1);
  if (size == 0 || size > kMostTokens)
    return invalid(t.where("model.vocab") + std::to_string(size) + " tokens, expected 1 to " +
                   std::to_string(kMostTokens));
  std::vector<bool> taken(size, false);
  t.texts.resize(size);
  const auto place = [&](std::uint32_t id, std::string_view text) -> Status {
    if (taken[id] && t.texts[id] != text)
      return invalid(t.path + ": tokens " + in_quotes(t.texts[id]) + " and " + in_quotes(text) +
                     " have the id " + std::to_string(id) + ", expected one");
    taken[id] = true;
    t.texts[id] = text;
    return {};
  };
  for (const auto& entry : json.vocabulary)
    BITTERN_TRY(place(entry.id, json.texts.view(entry.text)));
  for (const AddedToken& token : json.added) {
    if (!token.has_id || token.content.empty())
      return invalid(t.where("added_tokens") + "a token without id or content");
    BITTERN_TRY(place(token.id, token.content));
    t.added.push_back({.id = static_cast<std::int32_t>(token.id),
                       .content = token.content,
                       .special = token.special,
                       .lstrip = token.lstrip,
                       .rstrip = token.rstrip,
                       .single_word = token.single_word,
                       .normalized = token.normalized.value_or(!token.special)});
  }
  for (std::size_t id = 0; id < size; ++id)
    if (!taken[id]) t.texts[id] = padding_token(id);
  return {};
}

Status read_merges(const TokenizerJson& json, TokenizerTables& t) {
  t.merges = MergeTable(json.merges.size());
  std::string joined;
  std::size_t i = 0;
  for (const auto& merge : json.merges) {
    const std::string_view left = json.texts.view(merge.left), right = json.texts.view(merge.right);
    joined.assign(left).append(right);
    std::uint32_t ids[3];
    std::size_t k = 0;
    for (const std::string_view part : {left, right, std::string_view(joined)}) {
      const std::int64_t id = t.find(part);
      if (id < 0)
        return invalid(t.where("model.merges") + "merge " + std::to_string(i) + ", " +
                       in_quotes(left) + " " + in_quotes(right) + ": " + in_quotes(part) +
                       " is no token, expected one");
      ids[k++] = static_cast<std::uint32_t>(id);
    }
    t.merges.put(ids[0], ids[1], ids[2], true);
    ++i;
  }
  return {};
}

Status read_model(const Json& json, TokenizerTables& t) {
  const Json* model = member(json, "model");
  if (model == nullptr) return invalid(t.where("model") + "missing, expected an object");
  const std::string type = text_member(*model, "type");
  if (type != "BPE" && !type.empty())
    return unsupported(t.where("model.type") + in_quotes(type) + ", expected BPE");
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix", "dropout"}) {
    const Json* value = member(*model, key);
    if (value != nullptr && *value != "" && *value != 0)
      return unsupported(t.where(std::string("model.") + key) + value->dump() + ", expected none");
  }
  t.ignore_merges = true_member(*model, "ignore_merges");
  t.fuse_unknown = true_member(*model, "fuse_unk");
  if (const std::string unknown = text_member(*model, "unk_token"); !unknown.empty())
    t.unknown = static_cast<std::int32_t>(t.find(unknown));
  return {};
}

// ---- the files beside it ----

Status read_companions(const std::string& folder, TokenizerTables& t) {
  const auto companions = tokenizer_detail::read_companions(folder);
  if (!companions) return companions.status();
  const auto generation = read_json_file(folder + "/generation_config.json");
  if (!generation) return generation.status();
  const auto token = [&](const char* key) -> std::optional<std::int32_t> {
    for (const Json* tree : {&companions->config, &companions->map}) {
      const Json* value = member(*tree, key);
      if (value == nullptr) continue;
      const std::string text =
          value->is_string() ? value->get<std::string>() : text_member(*value, "content");
      if (const std::int64_t id = t.find(text); id >= 0) return static_cast<std::int32_t>(id);
    }
    return {};
  };
  const auto ids = [&](const Json& tree, const char* key) {
    std::vector<std::int32_t> out;
    const Json* value = member(tree, key);
    if (value == nullptr) return out;
    const Json list = value->is_array() ? *value : Json::array({*value});
    for (const Json& id : list)
      if (id.is_number_unsigned() && id.get<std::uint64_t>() < t.texts.size())
        out.push_back(id.get<std::int32_t>());
    return out;
  };
  t.bos = token("bos_token");
  t.eos = token("eos_token");
  if (t.eos) t.ends.push_back(*t.eos);
  for (const Json* tree : {&*generation, &companions->model}) {
    for (const std::int32_t id : ids(*tree, "eos_token_id"))
      if (std::ranges::find(t.ends, id) == t.ends.end()) t.ends.push_back(id);
    if (const auto found = ids(*tree, "bos_token_id"); !t.bos && !found.empty()) t.bos = found[0];
  }
  if (!t.eos && !t.ends.empty()) t.eos = t.ends[0];
  const auto templates = tokenizer_detail::chat_templates(*companions);
  if (!templates) return templates.status();
  for (const auto& chat : *templates)
    if (chat.name == "default" || templates->size() == 1) t.chat_template = chat.text;
  return {};
}

Result<TokenizerTables> read_json(const std::string& folder) {
  TokenizerTables t;
  t.path = folder + "/tokenizer.json";
  auto json = read_tokenizer_json(t.path);
  if (!json) return json.status();
  BITTERN_TRY(read_tokens(*json, t));
  BITTERN_TRY(read_pre_tokenizers(json->rest, t));
  BITTERN_TRY(t.finish());
  BITTERN_TRY(read_model(json->rest, t));
  BITTERN_TRY(read_merges(*json, t));
  BITTERN_TRY(read_normalizers(json->rest, t));
  BITTERN_TRY(read_decoder(json->rest, t));
  BITTERN_TRY(read_post_processor(json->rest, t));
  BITTERN_TRY(read_companions(folder, t));
  return t;
}

Result<TokenizerTables> read_pieces(const std::string& folder) {
  TokenizerTables t;
  t.path = folder + "/tokenizer.model";
  const auto model = read_sentencepiece(t.path);
  if (!model) return model.status();
  t.kind = TokenizerTables::Kind::scores;
  t.like_llama_cpp = t.marks_spaces = true;
  for (const auto& piece : model->pieces) {
    const auto id = static_cast<std::int32_t>(t.texts.size());
    t.texts.emplace_back(model->texts.view(piece.text));
    t.scores.push_back(piece.score);
    const bool special = piece.type == TokenType::control || piece.type == TokenType::unknown;
    if (special || piece.type == TokenType::user_defined)
      t.added.push_back({.id = id, .content = t.texts.back(), .special = special});
  }
  if (model->add_dummy_prefix) t.space_prefix = SpacePrefix::always;
  t.strip_first_space = model->add_dummy_prefix;
  const auto within = [&](std::int64_t id) {
    return id >= 0 && id < static_cast<std::int64_t>(t.texts.size());
  };
  BITTERN_TRY(t.finish());
  if (within(model->unk)) t.unknown = static_cast<std::int32_t>(model->unk);
  BITTERN_TRY(read_companions(folder, t));
  if (!t.bos && within(model->bos)) t.bos = static_cast<std::int32_t>(model->bos);
  if (!t.eos && within(model->eos)) t.eos = static_cast<std::int32_t>(model->eos);
  if (t.eos && t.ends.empty()) t.ends.push_back(*t.eos);
  if (t.bos) t.before.push_back(*t.bos);
  return t;
}

}  // namespace

Result<TokenizerTables> read_folder_tokenizer(const std::string& folder) {
  for (const auto& [name, read] :
       {std::pair{"/tokenizer.json", &read_json}, {"/tokenizer.model", &read_pieces}})
    if (is_there(folder + name)) return read(folder);
  return invalid(folder + ": no tokeniser, expected tokenizer.json or tokenizer.model");
}

}  // namespace bittern::text
