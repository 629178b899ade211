// What config.json and GGUF metadata both say about a model, read from either and written as
// either.
#pragma once
#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "bittern/status.h"
#include "convert/architecture.h"
#include "formats/gguf.h"

namespace bittern {

enum class Arch { llama, qwen2, qwen3, qwen3moe, gemma3, qwen3next, qwen35, qwen35moe };

// Whether most layers are gated delta nets.
constexpr bool gated_delta(Arch arch) {
  return arch == Arch::qwen3next || arch == Arch::qwen35 || arch == Arch::qwen35moe;
}

// A model type of transformers and what its configuration takes for granted.
struct ModelType {
  const char* name;        // model_type
  const char* class_name;  // of architectures
  Arch arch;
  const char* vision;        // the model type that holds this one in a text_config, or null
  const char* vision_class;  // of architectures
  bool tied;                 // word embeddings
  std::int64_t kv_heads;     // 0: as many as heads
  std::int64_t head_dim;     // 0: hidden_size / num_attention_heads
  std::int64_t context;      // max_position_embeddings
  double theta;              // rope_theta
  double eps;                // rms_norm_eps
};

const ModelType* model_type(std::string_view name);  // null: not known
const char* gguf_name(Arch arch);

struct Rope {
  double theta = 10000;
  double local_theta = 10000;          // of gemma3's sliding layers
  std::string type = "default";        // or linear, yarn, llama3
  double factor = 1;                   // all but default
  std::int64_t context = 0;            // original_max_position_embeddings of yarn and llama3
  double low = 1, high = 4;            // low_freq_factor, high_freq_factor of llama3
  double part = 1;                     // of a head that turns
  std::vector<std::int64_t> sections;  // of M-RoPE
};

struct Model {
  const ModelType* type = nullptr;
  bool in_vision = false;  // the language model of one that sees

  std::int64_t layers = 0, hidden = 0, heads = 0, kv_heads = 0, head_dim = 0, vocab = 0;
  std::int64_t context = 0;
  std::int64_t feed_forward = 0;  // 0: all layers have experts of another size
  double eps = 0;
  bool tied = false;
  bool attention_bias = false, mlp_bias = false;  // of llama
  std::string activation;
  Rope rope;

  // Layers are alike but for every `period`-th one, which has full attention: the others look back
  // `window` tokens (gemma3) or are gated delta nets. 0: all have full attention. mistral has a
  // window and no period.
  std::int64_t period = 0, window = 0;
  double query_scale = 0;    // gemma3: query_pre_attn_scalar
  double logit_softcap = 0;  // gemma3: final_logit_softcapping, 0: none

  std::int64_t experts = 0, experts_used = 0, expert_feed_forward = 0, shared_feed_forward = 0;

  // The gated delta net.
  std::int64_t conv_kernel = 0, key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0;

  std::optional<std::int64_t> bos, eos, pad;

  Arch arch() const { return type->arch; }
  bool is(std::string_view model_type) const { return model_type == type->name; }
  bool gated_delta() const { return bittern::gated_delta(type->arch); }
  bool is_linear(std::int64_t layer) const { return gated_delta() && (layer + 1) % period != 0; }
  std::int64_t rotary_dim() const {
    // A stranger's factor may be anything until it is checked.
    return static_cast<std::int64_t>(std::clamp(rope.part * double(head_dim), 0.0, 0x1p52));
  }
};

// Bounds on what strangers' files claim, far above any model, so that no product of sizes overflows
// and no list grows beyond reason before tensors are compared with them.
Status check_sizes(const Model& model);

// The text model's part of a config.json: text_config where there is one.
const nlohmann::ordered_json& text_config(const nlohmann::ordered_json& config);

Result<Model> model_from_config(const nlohmann::ordered_json& config);
nlohmann::ordered_json config_from_model(const Model& model, std::string_view dtype);

Result<Model> model_from_gguf(const GgufFile& file);
Status add_metadata(const Model& model, GgufMetadata& metadata);

// llama3's factors of the rotary frequencies: a frequency f becomes f / factor[i].
std::vector<float> llama3_factors(const Rope& rope, std::int64_t rotary_dim);

}  // namespace bittern
