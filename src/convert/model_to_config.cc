// A model as a config.json, and one that is made for another world.
#include <cmath>

#include "convert/model_config.h"

namespace bittern {
namespace {

using Json = nlohmann::ordered_json;

void put_rope(const ModelConfig& m, Json& config) {
  const RopeConfig& rope = m.rope;
  config["rope_theta"] = rope.theta;
  if (m.arch() == Arch::phi3) {
    config["partial_rotary_factor"] = rope.part;
    config["original_max_position_embeddings"] = rope.context;
  }
  if (m.arch() == Arch::gemma3) config["rope_local_base_freq"] = rope.local_theta;
  if (rope.type == "default") {
    config["rope_scaling"] = nullptr;
    return;
  }
  Json scaling = {{"rope_type", rope.type}};
  if (rope.type == "longrope") {
    scaling["type"] = rope.type;  // where mlx-lm's phi3 looks
    scaling["short_factor"] = rope.short_factors;
    scaling["long_factor"] = rope.long_factors;
  } else {
    scaling["factor"] = rope.factor;
  }
  if (rope.attention != 0) scaling["attention_factor"] = rope.attention;
  if (rope.beta_fast != 32) scaling["beta_fast"] = rope.beta_fast;
  if (rope.beta_slow != 1) scaling["beta_slow"] = rope.beta_slow;
  if (rope.mscale != 0) scaling["mscale"] = rope.mscale;
  if (rope.mscale_all != 0) scaling["mscale_all_dim"] = rope.mscale_all;
  if (!rope.truncate) scaling["truncate"] = false;
  if (rope.type == "llama3") {
    scaling["low_freq_factor"] = rope.low;
    scaling["high_freq_factor"] = rope.high;
  }
  if (rope.context != 0) scaling["original_max_position_embeddings"] = rope.context;
  config["rope_scaling"] = std::move(scaling);
}

// What transformers 5 calls for where the model is younger than it.
Json rope_parameters(const ModelConfig& m) {
  const RopeConfig& rope = m.rope;
  Json all = {{"rope_type", rope.type}, {"rope_theta", rope.theta}};
  all["partial_rotary_factor"] = rope.part;
  if (!rope.sections.empty()) {
    all["mrope_section"] = rope.sections;
    all["mrope_interleaved"] = true;
  }
  if (rope.type != "default") all["factor"] = rope.factor;
  if (rope.context != 0) all["original_max_position_embeddings"] = rope.context;
  return all;
}

}  // namespace

Json config_from_model(const ModelConfig& m, std::string_view dtype) {
  Json config;
  config["architectures"] = {m.type->class_name};
  config["model_type"] = m.type->name;
  config["dtype"] = dtype;
  config["vocab_size"] = m.vocab;
  config["hidden_size"] = m.hidden;
  if (m.feed_forward != 0) config["intermediate_size"] = m.feed_forward;
  config["num_hidden_layers"] = m.layers;
  config["num_attention_heads"] = m.heads;
  config["num_key_value_heads"] = m.kv_heads;
  config["head_dim"] = m.head_dim;
  const bool gemma = m.arch() == Arch::gemma2 || m.arch() == Arch::gemma3;
  config[gemma ? "hidden_activation" : "hidden_act"] = m.activation;
  config["max_position_embeddings"] = m.context;
  config["rms_norm_eps"] = m.eps;
  config["tie_word_embeddings"] = m.tied;
  if (m.arch() == Arch::qwen2moe) {
    config["qkv_bias"] = m.attention_bias;
  } else if (m.arch() != Arch::qwen2) {
    config["attention_bias"] = m.attention_bias;
  }
  if (m.arch() == Arch::llama || m.arch() == Arch::smollm3) config["mlp_bias"] = m.mlp_bias;
  if (has_window_switch(m.arch())) config["use_sliding_window"] = m.window != 0;
  if (m.window != 0 || m.is("mistral"))
    config["sliding_window"] = m.window == 0 ? Json() : Json(m.window);

  if (m.arch() == Arch::qwen35 || m.arch() == Arch::qwen35moe) {
    config["rope_parameters"] = rope_parameters(m);
  } else {
    put_rope(m, config);
    if (m.arch() == Arch::qwen3next) config["partial_rotary_factor"] = m.rope.part;
  }
  if (m.arch() == Arch::smollm3) {
    Json turning = Json::array();
    for (const bool turns : m.turning) turning.push_back(turns ? 1 : 0);
    config["no_rope_layers"] = std::move(turning);
  }
  if (m.arch() == Arch::gemma2) {
    const auto softcap = [](double x) { return x == 0 ? Json() : Json(x); };
    config["attn_logit_softcapping"] = softcap(m.attention_softcap);
    config["final_logit_softcapping"] = softcap(m.logit_softcap);
  } else if (m.logit_softcap != 0) {
    config["final_logit_softcapping"] = m.logit_softcap;
  }
  if (gemma) {
    config["sliding_window_pattern"] = m.period;
    const bool whole = m.query_scale == std::floor(m.query_scale) && std::abs(m.query_scale) < 1e9;
    config["query_pre_attn_scalar"] =
        whole ? Json(static_cast<std::int64_t>(m.query_scale)) : Json(m.query_scale);
  }
  if (m.gated_delta()) {
    config["full_attention_interval"] = m.period;
    config["linear_conv_kernel_dim"] = m.conv_kernel;
    config["linear_num_key_heads"] = m.key_heads;
    config["linear_num_value_heads"] = m.value_heads;
    config["linear_key_head_dim"] = m.key_dim;
    config["linear_value_head_dim"] = m.value_dim;
  }
  if (m.period != 0) {
    Json types = Json::array();
    for (std::int64_t i = 0; i < m.layers; ++i) {
      types.push_back((i + 1) % m.period == 0 ? "full_attention"
                      : m.gated_delta()       ? "linear_attention"
                                              : "sliding_attention");
    }
    config["layer_types"] = std::move(types);
  }
  if (m.arch() == Arch::llama && m.experts != 0) {
    config["num_local_experts"] = m.experts;
    config["num_experts_per_tok"] = m.experts_used;
  } else if (m.experts != 0) {
    config["num_experts"] = m.experts;
    config["num_experts_per_tok"] = m.experts_used;
    config["moe_intermediate_size"] = m.expert_feed_forward;
    if (m.shared_feed_forward != 0)
      config["shared_expert_intermediate_size"] = m.shared_feed_forward;
    if (m.arch() != Arch::qwen35moe) {
      config["norm_topk_prob"] = m.norm_topk;
      config["decoder_sparse_step"] = m.sparse_step;
      config["mlp_only_layers"] = Json::array();
      for (const std::int64_t layer : m.dense_layers) config["mlp_only_layers"].push_back(layer);
    }
  }
  const auto token = [&](const char* key, const std::optional<std::int64_t>& id) {
    config[key] = id ? Json(*id) : Json();  // or transformers has one of its own
  };
  token("bos_token_id", m.bos);
  token("eos_token_id", m.eos);
  token("pad_token_id", m.pad);
  return config;
}

Result<Json> config_for(World to, const Json& config) {
  const auto model = model_from_config(config);
  if (!model) return model.status();
  Json text = text_config(config);
  for (const char* key : {"dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id"})
    if (!text.contains(key) && config.contains(key)) text[key] = config[key];
  for (const char* key : {"quantization", "quantization_config"}) text.erase(key);
  text["model_type"] = model->type->name;
  text["architectures"] = {model->type->class_name};
  text["vocab_size"] = model->vocab;
  text["tie_word_embeddings"] = model->tied;
  if (to != World::mlx) return text;

  BITTERN_TRY(check_mlx_lm(*model));
  if (!has_tied(model->arch(), to)) text["tie_word_embeddings"] = false;

  // mlx-lm reads these where transformers before 5 had them, and has defaults of its own.
  const Json usual = config_from_model(*model, "");
  for (const char* key : {"num_attention_heads",
                          "num_key_value_heads",
                          "head_dim",
                          "intermediate_size",
                          "rms_norm_eps",
                          "max_position_embeddings",
                          "rope_theta",
                          "rope_local_base_freq",
                          "rope_scaling",
                          "rope_parameters",
                          "partial_rotary_factor",
                          "original_max_position_embeddings",
                          "no_rope_layers",
                          "sliding_window",
                          "sliding_window_pattern",
                          "query_pre_attn_scalar",
                          "attn_logit_softcapping",
                          "final_logit_softcapping",
                          "full_attention_interval",
                          "num_experts",
                          "norm_topk_prob",
                          "decoder_sparse_step",
                          "mlp_only_layers"})
    if (usual.contains(key)) text[key] = usual[key];
  if (model->is("smollm3") && model->window != 0 && !text.contains("layer_types"))
    for (const bool turns : model->turning)
      text["layer_types"].push_back(turns ? "full_attention" : "sliding_attention");
  if (model->arch() != Arch::qwen35 && model->arch() != Arch::qwen35moe) return text;

  // Known to it as the vision model's language model only.
  Json outer;
  outer["architectures"] = {model->type->vision_class};
  outer["model_type"] = model->type->vision;
  for (const char* key : {"dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id"})
    if (text.contains(key)) outer[key] = text[key];
  outer["tie_word_embeddings"] = model->tied;
  text.erase("architectures");
  outer["text_config"] = std::move(text);
  return outer;
}

}  // namespace bittern
