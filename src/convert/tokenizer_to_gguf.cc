// The tokeniser of a folder as GGUF's metadata. Byte-level BPE is here, the rest in the files that
// tokenizer_parts.h names.
#include <algorithm>

#include "convert/tokenizer.h"
#include "convert/tokenizer_parts.h"
#include "core/guarded.h"
#include "formats/json_events.h"
#include "formats/side_file.h"

namespace bittern {

using namespace tokenizer_detail;

namespace {

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

Status check_model(const Json& rest, const std::string& path) {
  const Json* model = member(rest, "model");
  if (model == nullptr) return invalid(path + ": model: missing, expected an object");
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
                       " has lstrip, rstrip or single_word, which GGUF cannot express");
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

}  // namespace

Result<Metadata> tokenizer_to_gguf(const std::string& folder, std::int64_t vocab_size,
                                   bool* like_phi3) {
  try {
    if (!is_there(folder + "/tokenizer.json") && is_there(folder + "/tokenizer.model"))
      return from_sentencepiece_model(folder, vocab_size);
    return from_json(folder, vocab_size, like_phi3);
  } catch (...) {
    return caught(folder);
  }
}

}  // namespace bittern
