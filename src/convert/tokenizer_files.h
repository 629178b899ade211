// The tokeniser files of a folder, read without trusting them.
#pragma once
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "bittern/status.h"
#include "convert/tokenizer_table.h"

namespace bittern {

// A JSON file as a tree of at most kMostJsonValues; null where the file is not there.
inline constexpr std::size_t kMostJsonValues = std::size_t{1} << 19;
Result<nlohmann::ordered_json> read_json_file(const std::string& path);

struct AddedToken {
  std::uint32_t id = 0;
  bool has_id = false, special = false;
  bool rstrip = false, lstrip = false, single_word = false;
  std::optional<bool> normalized{};  // where it is not said: unless special
  std::string content;
};

// Text in one run of bytes: a string for each of 300,000 tokens costs more than the text.
struct TextPool {
  struct Span {
    std::uint32_t offset = 0, size = 0;
  };
  std::string bytes;

  Span add(std::string_view text) {
    const auto offset = static_cast<std::uint32_t>(bytes.size());
    bytes.append(text);
    return {offset, static_cast<std::uint32_t>(text.size())};
  }
  std::string_view view(Span span) const {
    return std::string_view(bytes).substr(span.offset, span.size);
  }
};

struct TokenizerJson {
  struct Entry {
    TextPool::Span text;
    std::uint32_t id = 0;
  };
  struct Merge {
    TextPool::Span left, right;
  };

  nlohmann::ordered_json rest;  // all but added_tokens, model.vocab and model.merges
  std::vector<Entry> vocabulary;
  std::vector<AddedToken> added;
  std::vector<Merge> merges;
  TextPool texts;
};
Result<TokenizerJson> read_tokenizer_json(const std::string& path);

// sentencepiece's tokenizer.model.
struct SentencePieces {
  struct Piece {
    TextPool::Span text;
    float score = 0;
    TokenType type = TokenType::normal;
  };
  std::vector<Piece> pieces;
  TextPool texts;
  bool add_dummy_prefix = true;
  std::int64_t unk = 0, bos = 1, eos = 2, pad = -1;
};
// Only models llama.cpp's "llama" tokeniser can follow: BPE, no normalisation, no spaces removed.
Result<SentencePieces> read_sentencepiece(const std::string& path);

}  // namespace bittern
