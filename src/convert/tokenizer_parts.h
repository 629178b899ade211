// What tokenizer_to_gguf reads from the files of a folder, a part each: the tokens and merges, how
// text is cut and normalised, and which tokens and templates have names.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bittern/status.h"
#include "convert/tokenizer_files.h"
#include "convert/tokenizer_table.h"
#include "formats/gguf_contents.h"

namespace bittern::tokenizer_detail {

using Json = nlohmann::ordered_json;
using Metadata = std::vector<std::pair<std::string, GgufData>>;

// Null where there is none, or null.
const Json* member(const Json& object, const char* key);
std::string text_member(const Json& object, const char* key);
bool true_member(const Json& object, const char* key, bool otherwise = false);

// Every step of a Sequence, of Sequences too; `list` is what a Sequence calls its steps.
Status flatten(const Json* node, const char* list, std::vector<const Json*>& steps, int depth = 0);

// ---- tokens (tokenizer_tokens.cc) ----

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

// Ids that no token has are filled as llama.cpp's converter does.
struct Slot {
  TextPool::Span text;
  TokenType type = TokenType::unused;
  bool taken = false;
};

Status place(Tokens& t, std::vector<Slot>& slots, const std::string& list, std::size_t id,
             TextPool::Span text, TokenType type);
Status finish(Tokens& t, std::vector<Slot>& slots);
Status check_vocabulary_size(const std::string& path, std::int64_t size);

// llama.cpp looks for tokens of the user's before spaces are marked.
std::string with_spaces(std::string_view text);

// vocab and added_tokens together. An added token may be in vocab too, under the same id.
Result<Tokens> gather(TokenizerJson& json, const std::string& path, std::int64_t vocab_size,
                      bool sentencepiece);

struct MergeIds {
  std::uint32_t left, right, joined;
};
Result<std::vector<MergeIds>> merge_ids(const TokenizerJson& json, const Tokens& t,
                                        bool sentencepiece);

// ---- how text is cut and what is around it (tokenizer_settings.cc) ----

struct Cutting {
  bool byte_level = false;
  std::vector<std::string> cuts;
  std::optional<std::string> metaspace;  // its prepend_scheme
};
Result<Cutting> cutting_of(const Json& json, const std::string& path);

struct Normalizing {
  bool nfc = false, marks_spaces = false, prepends = false;
};
Result<Normalizing> normalizing_of(const Json& json, const std::string& path);

struct Companions {
  std::string folder;
  Json config, map, model;  // tokenizer_config.json, special_tokens_map.json, config.json
};
Result<Companions> read_companions(const std::string& folder);

using NamedIds = std::array<std::optional<std::uint32_t>, std::size(kNamedTokens)>;

// By text in the tokeniser's files, else by id in the model's.
Result<NamedIds> named_ids(const Companions& c, const Tokens& t);

struct Affixes {
  bool bos = false, eos = false;
};
// What is put around the text: tokenizer.json's post_processor decides, as it does for
// transformers; tokenizer_config.json only where there is none.
Result<Affixes> affixes_of(const Companions& c, const Json& json, const std::string& path,
                           const Tokens& t, const NamedIds& ids);

// What a folder has as chat template: one called "default", or several.
struct ChatTemplate {
  std::string name, text;
};
Result<std::vector<ChatTemplate>> chat_templates(const Companions& c);

// ---- as metadata ----

Status put_chat_template(Metadata& out, const Companions& c);
void put_tokens(Metadata& out, const Tokens& t, const char* model, const char* pre);
void put_ids(Metadata& out, const NamedIds& ids, const Affixes& affixes);

// ---- sentencepiece's BPE (sentencepiece_to_gguf.cc) ----

Result<Metadata> from_sentencepiece_json(TokenizerJson& json, const std::string& path,
                                         const Companions& c, const Cutting& cutting,
                                         std::int64_t vocab_size);
Result<Metadata> from_sentencepiece_model(const std::string& folder, std::int64_t vocab_size);

}  // namespace bittern::tokenizer_detail
