// The tokeniser of a GGUF file, with llama.cpp's defaults and corner cases.
#include <algorithm>
#include <cmath>

#include "convert/tokenizer_source.h"
#include "formats/json_events.h"
#include "text/tables.h"

namespace bittern::text {
namespace {

using tokenizer_detail::Source;

// llama.cpp's own patterns where they are not those of the model.
std::vector<std::string> llama_cuts(std::string_view pre, std::vector<std::string> cuts) {
  // It knows upper and lower case of A to Z alone, and marks are no letters.
  constexpr const char* kUpper = "[^\\P{L}a-z]";
  constexpr const char* kLower = "[^\\P{L}A-Z]";
  constexpr const char* kContractions = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])";
  const bool suffixed = pre == "gpt-4o" || pre == "llama4" || pre == "kanana2" || pre == "talkie" ||
                        pre == "minimax-m2";
  if (pre == "tekken" || suffixed) {
    const std::string start = "[^\\r\\n\\p{L}\\p{N}]?";
    const std::string end = suffixed ? std::string(kContractions) + "?" : "";
    return {start + kUpper + "*" + kLower + "+" + end + "|" + start + kUpper + "+" + kLower + "*" +
            end + (suffixed ? "|\\p{N}{1,3}" : "|\\p{N}") +
            "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"};
  }
  if (pre == "deepseek-llm") cuts.back() = "\\p{N}+";  // digits together
  // 's in either case is spelled out there, so that U+017F is no s.
  constexpr std::string_view kEitherCase = "(?i:'s|'t|'re|'ve|'m|'ll|'d)";
  for (std::string& cut : cuts)
    for (std::size_t at; (at = cut.find(kEitherCase)) != cut.npos;)
      cut.replace(at, kEitherCase.size(), kContractions);
  return cuts;
}

Status read_byte_level(Source& s, TokenizerTables& t) {
  std::string_view pre = "default";
  if (s.file.find("tokenizer.ggml.pre") != nullptr) {
    const auto value = s.file.string("tokenizer.ggml.pre");
    if (!value) return value.status();
    pre = *value;
  }
  const PreTokenizer* row = find_pre_tokenizer(pre);
  if (row == nullptr)
    return unsupported(s.where("ggml.pre") + in_quotes(pre) + ", expected one of " +
                       pre_tokenizer_names());
  s.add_bos = row->add_bos;
  BITTERN_TRY(read_specials(s));
  t.ignore_merges = row->ignore_merges;
  for (const std::string& cut : llama_cuts(pre, row->cuts))
    BITTERN_TRY(t.cutter.add(s.where("ggml.pre") + in_quotes(pre), {.pattern = cut}));

  const auto array = s.file.array("tokenizer.ggml.merges");
  if (!array) return array.status();
  if (array->element() != GgufType::string || array->size() > kMostMerges)
    return invalid(s.where("ggml.merges") + std::to_string(array->size()) + " of type " +
                   name(array->element()) + ", expected at most " + std::to_string(kMostMerges) +
                   " strings");
  t.merges = MergeTable(array->size());
  Status status;
  std::size_t i = 0;
  std::string joined;
  array->each([&](const GgufValue& value) {
    if (!status.ok()) return;
    const std::string_view merge = *value.as_string();
    const std::size_t space = merge.size() > 1 ? merge.find(' ', 1) : merge.npos;
    std::int64_t ids[3] = {-1, -1, -1};
    if (space != merge.npos) {
      const std::string_view left = merge.substr(0, space), right = merge.substr(space + 1);
      joined.assign(left).append(right);
      ids[0] = s.index.find(s.tokens, left);
      ids[1] = s.index.find(s.tokens, right);
      ids[2] = s.index.find(s.tokens, joined);
    }
    if (std::ranges::find(ids, -1) != std::end(ids)) {
      status = invalid(s.where("ggml.merges") + "merge " + std::to_string(i) + ", " +
                       in_quotes(merge) + ": expected two tokens that make a third");
      return;
    }
    t.merges.put(static_cast<std::uint32_t>(ids[0]), static_cast<std::uint32_t>(ids[1]),
                 static_cast<std::uint32_t>(ids[2]), false);
    ++i;
  });
  return status;
}

Status read_sentencepiece(Source& s, TokenizerTables& t) {
  bool add_space_prefix = true;
  BITTERN_TRY(read_sentencepiece_settings(s, add_space_prefix, t.scores));
  t.kind = TokenizerTables::Kind::scores;
  t.marks_spaces = true;
  if (add_space_prefix) t.space_prefix = SpacePrefix::always;
  t.strip_first_space = add_space_prefix;
  return {};
}

// Tokens that end a turn by their name, as llama.cpp knows them.
constexpr const char* kEndNames[] = {
    "<|eot_id|>",         "<|im_end|>", "<|end|>",         "<end_of_turn>", "<|endoftext|>",
    "<|eom_id|>",         "<EOT>",      "<|end_of_text|>", "<|EOT|>",       "<|END_OF_TURN_TOKEN|>",
    "<end_of_utterance>", "<|return|>", "<|call|>",        "<turn|>",
};

}  // namespace

Result<TokenizerTables> read_gguf_tokenizer(const std::string& path) {
  const auto file = GgufFile::open(path);
  if (!file) return file.status();
  Source s(*file);
  TokenizerTables t;
  t.path = path;
  t.like_llama_cpp = true;
  BITTERN_TRY(tokenizer_detail::read_source(s));
  const std::string_view model = *file->string("tokenizer.ggml.model");
  BITTERN_TRY(model == "gpt2" ? read_byte_level(s, t) : read_sentencepiece(s, t));
  t.texts.assign(s.tokens.begin(), s.tokens.end());
  for (std::size_t id = 0; id < s.tokens.size(); ++id) {
    if (!s.added(id)) continue;
    const bool special = s.types[id] != TokenType::user_defined;
    t.added.push_back({.id = static_cast<std::int32_t>(id),
                       .content = s.token(id),
                       .special = special,
                       .rstrip = s.phi3 && special && phi3_strips(s.tokens[id])});
  }
  const auto as_id = [](std::size_t id) { return static_cast<std::int32_t>(id); };
  if (s.named[kBos]) t.bos = as_id(*s.named[kBos]);
  if (s.named[kEos]) t.eos = as_id(*s.named[kEos]);
  if (s.named[kUnk] && model != "gpt2") t.unknown = as_id(*s.named[kUnk]);
  if (s.add_bos) t.before.push_back(*t.bos);
  if (s.add_eos) t.after.push_back(*t.eos);
  const auto add_end = [&](std::optional<std::size_t> id) {
    if (id && std::ranges::find(t.ends, as_id(*id)) == t.ends.end()) t.ends.push_back(as_id(*id));
  };
  for (const auto& id : {s.named[kEos], s.eot, s.eom}) add_end(id);
  for (const char* name : kEndNames) {
    const std::int64_t id = s.index.find(s.tokens, name);
    if (id >= 0 && s.added(static_cast<std::size_t>(id))) add_end(static_cast<std::size_t>(id));
  }
  BITTERN_TRY(t.finish());
  if (file->find("tokenizer.chat_template") != nullptr) {
    const auto text = file->string("tokenizer.chat_template");
    if (!text) return text.status();
    t.chat_template = std::string(*text);
  }
  return t;
}

}  // namespace bittern::text
