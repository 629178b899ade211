// What the tests of tokenisers share: keys of GGUF files, and either direction in one call.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "convert/tokenizer.h"
#include "convert/tokenizer_table.h"
#include "formats/test_files.h"

namespace bittern::tokenizer_test {

using Json = nlohmann::ordered_json;
using Strings = std::vector<std::string>;
using Keys = std::map<std::string, GgufData>;

inline GgufData strings(const Strings& values) {
  const std::vector<std::string_view> views(values.begin(), values.end());
  return GgufData::strings(views);
}
inline GgufData integers(const std::vector<std::int32_t>& values) {
  return GgufData::array(std::span<const std::int32_t>(values));
}
inline GgufData floats(const std::vector<float>& values) {
  return GgufData::array(std::span<const float>(values));
}
inline GgufData id(std::uint32_t value) { return GgufData(value); }

// The files made from a GGUF file with these keys, by name; or the error without the file's path.
struct Files {
  std::map<std::string, std::string> text;
  std::string error;
  Json json(const std::string& name) const { return Json::parse(text.at(name)); }
};
inline Files from_gguf(const Keys& keys) {
  const TempFolder folder;
  const std::string path = folder.path("m.gguf");
  GgufContents contents(path);
  for (const auto& [key, value] : keys) EXPECT_TRUE(contents.add(key, value).ok());
  folder.put("m.gguf", file_text(contents.lay_out(), {}));
  const auto file = GgufFile::open(path);
  EXPECT_TRUE(file.ok()) << file.status().message();
  const auto files = tokenizer_from_gguf(*file);
  Files out;
  if (!files) {
    out.error = files.status().message();
    if (out.error.rfind(path + ": ", 0) == 0) out.error.erase(0, path.size() + 2);
  } else {
    for (const TextFile& text : *files) out.text[text.name] = text.text;
  }
  return out;
}

struct Metadata {
  std::map<std::string, std::vector<std::byte>> encoded;
  std::string error;
  bool has(const std::string& key, const GgufData& value) const {
    const auto it = encoded.find(key);
    return it != encoded.end() && std::ranges::equal(it->second, value.encoded());
  }
};
inline Metadata to_gguf(const TempFolder& folder, std::int64_t vocab_size) {
  const auto keys = tokenizer_to_gguf(folder.path(), vocab_size);
  Metadata out;
  if (!keys) {
    out.error = keys.status().message();
    if (out.error.rfind(folder.path() + "/", 0) == 0) out.error.erase(0, folder.path().size() + 1);
  } else {
    for (const auto& [key, value] : *keys)
      out.encoded[key].assign(value.encoded().begin(), value.encoded().end());
  }
  return out;
}
inline Metadata back_to_gguf(const Files& files, std::int64_t vocab_size) {
  const TempFolder folder;
  for (const auto& [name, text] : files.text) folder.put(name, text);
  return to_gguf(folder, vocab_size);
}

inline Keys with(Keys keys, const char* key, GgufData value) {
  keys.insert_or_assign(key, std::move(value));
  return keys;
}
inline Keys without(Keys keys, const char* key) {
  keys.erase(key);
  return keys;
}

// ---- sentencepiece's BPE ----

struct Pieces {
  Strings tokens = {"<unk>", "<s>", "</s>"};
  std::vector<std::int32_t> types = {2, 3, 3};
  std::vector<float> scores = {0, 0, 0};
  void add(const std::string& token, float score, TokenType type = TokenType::normal) {
    tokens.push_back(token);
    scores.push_back(score);
    types.push_back(static_cast<int>(type));
  }
};

inline Pieces some_pieces() {
  Pieces p;
  for (int byte = 0; byte < 256; ++byte) p.add(byte_token(byte), 0, TokenType::byte);
  p.add("\u2581a", -1);
  p.add("ab", -2);
  p.add("\u2581ab", -3);
  p.add("\u2581", -4);
  p.add("a", -5);
  p.add("b", -6);
  p.add("\u2581\u2581", -1e9f);
  p.add("\u2581\u2581\u2581", -1e9f);
  p.add("\u2581\u2581\u2581\u2581", -1e9f);
  p.add("<tool>", 0, TokenType::user_defined);
  return p;
}
inline Keys sentencepiece(const Pieces& p) {
  Keys keys;
  const auto put = [&](const char* key, GgufData value) { keys.emplace(key, std::move(value)); };
  put("general.architecture", GgufData("llama"));
  put("tokenizer.ggml.model", GgufData("llama"));
  put("tokenizer.ggml.pre", GgufData("default"));
  put("tokenizer.ggml.tokens", strings(p.tokens));
  put("tokenizer.ggml.scores", floats(p.scores));
  put("tokenizer.ggml.token_type", integers(p.types));
  put("tokenizer.ggml.bos_token_id", id(1));
  put("tokenizer.ggml.eos_token_id", id(2));
  put("tokenizer.ggml.unknown_token_id", id(0));
  put("tokenizer.ggml.add_bos_token", GgufData(true));
  put("tokenizer.ggml.add_eos_token", GgufData(false));
  put("tokenizer.ggml.add_space_prefix", GgufData(true));
  return keys;
}

}  // namespace bittern::tokenizer_test
