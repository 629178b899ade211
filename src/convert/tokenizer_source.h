// What tokenizer_from_gguf reads from the metadata, and how it becomes tokenizer.json.
#pragma once
#include <array>
#include <cstddef>
#include <functional>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "bittern/status.h"
#include "convert/tokenizer.h"
#include "convert/tokenizer_table.h"
#include "formats/gguf.h"

namespace bittern::tokenizer_detail {

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

// Tokens, types and whether tokens take spaces with them; refuses kinds of tokeniser that are
// neither gpt2 nor llama.
Status read_source(Source& s);
Status read_flag(const Source& s, const char* name, bool& flag);
// Named tokens and what is put around the text.
Status read_specials(Source& s);

// Of sentencepiece's (sentencepiece_from_gguf.cc): named tokens with llama.cpp's defaults, the flag
// and a score for each token. Refuses a vocabulary without a token for each byte.
Status read_sentencepiece_settings(Source& s, bool& add_space_prefix, std::vector<float>& scores);

// ---- tokenizer.json (tokenizer_json.cc) ----

// What of tokenizer.json is not a list of tokens or merges.
struct Frame {
  Json normalizer, pre_tokenizer, decoder;
  Json model;  // without vocab and merges
};

void put_merge(std::string& out, std::string_view left, std::string_view right, bool first);

// `put_merges` appends them.
Result<TextFile> tokenizer_json(const Source& s, const Frame& shape, std::size_t merge_bytes,
                                const std::function<Status(std::string&)>& put_merges);

Json bpe_model(const Json& unk, bool byte_fallback, bool ignore_merges);

// ---- the two kinds ----

Result<TextFile> byte_level_tokenizer(Source& s);
Result<TextFile> sentencepiece_tokenizer(Source& s);  // sentencepiece_from_gguf.cc

}  // namespace bittern::tokenizer_detail
