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

// A llama of one layer with rows of 256 and an MLP of `inner`; its path.
inline std::string put_wide_model(const TempFolder& folder, std::uint64_t inner) {
  std::vector<StoredTensor> tensors;
  std::uint32_t state = 7;
  const auto add = [&](const std::string& name, std::vector<std::uint64_t> shape) {
    const std::uint64_t count = shape.size() == 2 ? shape[0] * shape[1] : shape[0];
    std::vector<float> values;
    for (std::uint64_t i = 0; i < count; ++i) {
      state = state * 1664525 + 1013904223;
      const float x = static_cast<float>(static_cast<std::int32_t>(state)) * 0x1p-31f;
      values.push_back(shape.size() == 1 ? 1.0f : x * x * x * 0.3f);
    }
    const auto bytes = std::as_bytes(std::span(values));
    tensors.push_back({{name, SafeDType::f32, std::move(shape)},
                       std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size())});
  };
  const std::string layer = "model.layers.0.";
  add("model.embed_tokens.weight", {96, 256});
  add("model.norm.weight", {256});
  add(layer + "input_layernorm.weight", {256});
  add(layer + "post_attention_layernorm.weight", {256});
  add(layer + "self_attn.q_proj.weight", {128, 256});
  add(layer + "self_attn.k_proj.weight", {64, 256});
  add(layer + "self_attn.v_proj.weight", {64, 256});
  add(layer + "self_attn.o_proj.weight", {256, 128});
  add(layer + "mlp.gate_proj.weight", {inner, 256});
  add(layer + "mlp.up_proj.weight", {inner, 256});
  add(layer + "mlp.down_proj.weight", {256, inner});
  const auto text = safetensors_text(tensors, {{"format", "pt"}});
  if (!text) throw std::runtime_error(std::string(text.status().message()));
  folder.put("wide/model.safetensors", *text);
  folder.put("wide/config.json",
             R"({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256,
                 "intermediate_size": )" +
                 std::to_string(inner) +
                 R"(, "num_hidden_layers": 1, "num_attention_heads": 4,
                 "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 96,
                 "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
                 "hidden_act": "silu", "tie_word_embeddings": true})");
  folder.put("wide/tokenizer.json", tiny_tokenizer());
  folder.put("wide/tokenizer_config.json", kTinyTokenizerConfig);
  return folder.path("wide");
}

}  // namespace bittern
