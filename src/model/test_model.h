// For tests: the tiny models of tests/golden/tiny_models.safetensors as folders, with a tokeniser.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "formats/safetensors.h"
#include "formats/test_files.h"
#include "text/tables.h"

namespace bittern {

inline const SafetensorsFile& tiny_models() {
  static const auto file = SafetensorsFile::open(BITTERN_GOLDEN "/tiny_models.safetensors");
  if (!file) throw std::runtime_error(std::string(file.status().message()));
  return *file;
}

// Tokens 0 and 1 are ChatML's, 2 is </s>; from 3 on a token a byte, of letters, digits, what texts
// need beside them, and of some longer characters. The models have 96 embeddings, more than tokens.
inline constexpr std::string_view kTinyBytes =
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 \n.,:;!?'-\xc3\xa9\xe2\x82\xac";

// A text of that many tokens, none after the other by any rule.
inline std::string tiny_text(int tokens) {
  std::string text;
  std::uint32_t state = 1;
  for (int i = 0; i < tokens; ++i) {
    state = state * 1664525 + 1013904223;
    text += kTinyBytes[(state >> 16) % 64];
  }
  return text;
}

inline std::string tiny_tokenizer() {
  std::string vocabulary;
  int id = 3;
  for (const char c : kTinyBytes) {
    const std::string& letter = text::byte_letters()[static_cast<unsigned char>(c)];
    vocabulary += (id > 3 ? ",\"" : "\"") + letter + "\":" + std::to_string(id);
    ++id;
  }
  return R"({"version":"1.0","added_tokens":[{"id":0,"content":"<|im_start|>","special":true},)"
         R"({"id":1,"content":"<|im_end|>","special":true},)"
         R"({"id":2,"content":"</s>","special":true}],"normalizer":null,)"
         R"("pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"use_regex":true},)"
         R"("post_processor":null,"decoder":{"type":"ByteLevel"},)"
         R"("model":{"type":"BPE","vocab":{)" +
         vocabulary + R"(},"merges":[]}})";
}

inline constexpr const char* kTinyTokenizerConfig =
    R"({"eos_token":"<|im_end|>","chat_template":"{% for message in messages %}{{)"
    R"('<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}})"
    R"({% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"})";

// The model's folder, as transformers would have saved it, in `folder`; its path.
inline std::string put_tiny_model(const TempFolder& folder, const std::string& model) {
  std::vector<StoredTensor> tensors;
  for (const auto& tensor : tiny_models().tensors()) {
    if (!tensor.name.starts_with(model + "/")) continue;
    const auto data = tiny_models().bytes(tensor);
    tensors.push_back({{tensor.name.substr(model.size() + 1), tensor.dtype, tensor.shape},
                       std::string(reinterpret_cast<const char*>(data.data()), data.size())});
  }
  const auto text = safetensors_text(tensors, {{"format", "pt"}});
  if (!text) throw std::runtime_error(std::string(text.status().message()));
  folder.put(model + "/model.safetensors", *text);
  for (const auto& [key, value] : tiny_models().metadata())
    if (key == model) folder.put(model + "/config.json", value);
  folder.put(model + "/tokenizer.json", tiny_tokenizer());
  folder.put(model + "/tokenizer_config.json", kTinyTokenizerConfig);
  return folder.path(model);
}

}  // namespace bittern
