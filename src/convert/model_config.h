// What config.json and GGUF metadata both say about a model, read from either and written as
// either.
#pragma once
#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bittern/status.h"
#include "convert/architecture.h"
#include "formats/gguf.h"

namespace bittern {

enum class Arch {
  llama,
  qwen2,
  qwen2moe,
  qwen3,
  qwen3moe,
  gemma2,
  gemma3,
  phi3,
  olmo2,
  smollm3,
  qwen3next,
  qwen35,
  qwen35moe
};

// Whether most layers are gated delta nets.
constexpr bool gated_delta(Arch arch) {
  return arch == Arch::qwen3next || arch == Arch::qwen35 || arch == Arch::qwen35moe;
}

// Whether use_sliding_window says if sliding_window counts.
constexpr bool has_window_switch(Arch arch) {
  return arch == Arch::qwen2 || arch == Arch::qwen2moe || arch == Arch::qwen3 ||
         arch == Arch::qwen3moe || arch == Arch::smollm3;
}

// A model type of transformers and the defaults of its configuration.
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

struct RopeConfig {
  double theta = 10000;
  double local_theta = 10000;          // of gemma3's sliding layers
  std::string type = "default";        // or linear, dynamic, yarn, llama3, longrope
  double factor = 1;                   // all but default and longrope
  std::int64_t context = 0;            // original_max_position_embeddings of phi3 and of yarn,
                                       // llama3 and longrope
  double low = 1, high = 4;            // low_freq_factor, high_freq_factor of llama3
  double part = 1;                     // of a head that turns
  std::vector<std::int64_t> sections;  // of M-RoPE

  // longrope: what frequencies are divided by, up to `context` tokens and beyond.
  std::vector<double> short_factors, long_factors;
  // What cosines and sines of yarn and longrope are multiplied by; 0: what the factor gives.
  double attention = 0;
  // yarn's constants; mscale, mscale_all_dim: 0 is none.
  double beta_fast = 32, beta_slow = 1, mscale = 0, mscale_all = 0;
  bool truncate = true;
};

struct ModelConfig {
  const ModelType* type = nullptr;
  bool in_vision = false;  // the language model of one that sees

  std::int64_t layers = 0, hidden = 0, heads = 0, kv_heads = 0, head_dim = 0, vocab = 0;
  std::int64_t context = 0;
  std::int64_t feed_forward = 0;  // 0: all layers have experts of another size
  double eps = 0;
  bool tied = false;
  bool attention_bias = false;  // of q, k and v, and of o but for qwen2 and qwen2moe
  bool mlp_bias = false;
  std::string activation;
  RopeConfig rope;

  // Layers are alike but for every `period`-th one, which has full attention: the others look back
  // `window` tokens (gemma2, gemma3) or are gated delta nets. 0: all have full attention. mistral
  // and phi3 have a window and no period.
  std::int64_t period = 0, window = 0;
  std::vector<bool> turning;     // smollm3: the layers whose heads turn
  double query_scale = 0;        // gemma: query_pre_attn_scalar
  double logit_softcap = 0;      // gemma: final_logit_softcapping, 0: none
  double attention_softcap = 0;  // gemma2: attn_logit_softcapping, 0: none

  std::int64_t experts = 0, experts_used = 0, expert_feed_forward = 0, shared_feed_forward = 0;
  bool norm_topk = false;                  // the weights of the experts used add up to 1
  std::int64_t sparse_step = 1;            // only every so many layers have experts,
  std::vector<std::int64_t> dense_layers;  // and these have none either

  // The gated delta net.
  std::int64_t conv_kernel = 0, key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0;

  // Tensors keep llama.cpp's order of value heads (qwen35), instead of Hugging Face's.
  bool value_heads_as_stored = false;

  std::optional<std::int64_t> bos, eos, pad;
  std::vector<std::string> unread;  // keys of config.json that may matter and were not read

  Arch arch() const { return type->arch; }
  bool is(std::string_view model_type) const { return model_type == type->name; }
  bool gated_delta() const { return bittern::gated_delta(type->arch); }
  bool is_linear(std::int64_t layer) const { return gated_delta() && (layer + 1) % period != 0; }
  bool is_dense(std::int64_t layer) const {
    return experts == 0 || (layer + 1) % sparse_step != 0 ||
           std::find(dense_layers.begin(), dense_layers.end(), layer) != dense_layers.end();
  }
  std::int64_t rotary_dim() const {
    // A stranger's factor may be anything until it is checked.
    return static_cast<std::int64_t>(std::clamp(rope.part * double(head_dim), 0.0, 0x1p52));
  }
};

// The attention factor that transformers, mlx-lm and llama.cpp's converter give longrope.
double usual_longrope_attention(std::int64_t context, std::int64_t original);

// Bounds on what strangers' files claim, far above any model, so that no product of sizes overflows
// and no list grows beyond reason before tensors are compared with them.
Status check_sizes(const ModelConfig& model);

// The text model's part of a config.json: text_config where there is one.
const nlohmann::ordered_json& text_config(const nlohmann::ordered_json& config);

Result<ModelConfig> model_from_config(const nlohmann::ordered_json& config);
nlohmann::ordered_json config_from_model(const ModelConfig& model, std::string_view dtype);

Result<ModelConfig> model_from_gguf(const GgufFile& file);
Status add_metadata(const ModelConfig& model, GgufMetadata& metadata);

// Factors of rotary frequencies by the names llama.cpp has for them: a frequency f becomes
// f / factor[i].
std::vector<std::pair<std::string, std::vector<float>>> rotary_factors(const ModelConfig& model);
std::vector<float> llama3_factors(const RopeConfig& rope, std::int64_t rotary_dim);
// The numbers behind such factors, with theta given; they give the same factors, bit for bit where
// there are any that do. `context`: the original one where known, else 0; `longest`: the model's.
bool solve_llama3(std::span<const float> factors, std::int64_t context, std::int64_t longest,
                  RopeConfig& rope);

// ---- what the programs of the other worlds make of a model (model_limits.cc) ----

// What llama.cpp or mlx-lm cannot compute is an error that says so.
Status check_llama_cpp(const ModelConfig& model);
Status check_mlx_lm(const ModelConfig& model);
// What they compute differently, a note each.
std::vector<std::string> differences(const ModelConfig& model, World to);
// What llama.cpp takes gemma's query_pre_attn_scalar for.
std::int64_t llama_cpp_query_scale(const ModelConfig& model);
// Whether they have models of this kind whose head is the embedding.
bool has_tied(Arch arch, World world);

}  // namespace bittern
