// A model from its config.json.
#include <algorithm>
#include <cmath>

#include "convert/config_fields.h"
#include "convert/model_config.h"
#include "formats/json_events.h"

namespace bittern {

using namespace config_detail;

namespace {

// clang-format off
constexpr ModelType kTypes[] = {
    // name, class, architecture, vision model, its class, tied, kv, head, context, theta, eps
    {"llama", "LlamaForCausalLM", Arch::llama, nullptr, nullptr, false, 0, 0, 2048, 1e4, 1e-6},
    {"mistral", "MistralForCausalLM", Arch::llama, nullptr, nullptr, false, 8, 0, 131072, 1e4, 1e-6},
    {"mixtral", "MixtralForCausalLM", Arch::llama, nullptr, nullptr, false, 8, 0, 131072, 1e6, 1e-5},
    {"qwen2", "Qwen2ForCausalLM", Arch::qwen2, nullptr, nullptr, false, 32, 0, 32768, 1e4, 1e-6},
    {"qwen2_moe", "Qwen2MoeForCausalLM", Arch::qwen2moe, nullptr, nullptr, false, 16, 0, 32768, 1e4, 1e-6},
    {"qwen3", "Qwen3ForCausalLM", Arch::qwen3, nullptr, nullptr, false, 32, 128, 32768, 1e4, 1e-6},
    {"qwen3_moe", "Qwen3MoeForCausalLM", Arch::qwen3moe, nullptr, nullptr, false, 4, 0, 32768, 1e4, 1e-6},
    {"phi3", "Phi3ForCausalLM", Arch::phi3, nullptr, nullptr, false, 0, 0, 4096, 1e4, 1e-5},
    {"olmo2", "Olmo2ForCausalLM", Arch::olmo2, nullptr, nullptr, false, 0, 0, 2048, 1e4, 1e-5},
    {"smollm3", "SmolLM3ForCausalLM", Arch::smollm3, nullptr, nullptr, true, 4, 0, 32768, 2e6, 1e-6},
    {"gemma2", "Gemma2ForCausalLM", Arch::gemma2, nullptr, nullptr, true, 4, 256, 8192, 1e4, 1e-6},
    {"gemma3_text", "Gemma3ForCausalLM", Arch::gemma3, "gemma3", "Gemma3ForConditionalGeneration", true, 4, 256, 131072, 1e6, 1e-6},
    {"qwen3_next", "Qwen3NextForCausalLM", Arch::qwen3next, nullptr, nullptr, false, 2, 256, 32768, 1e4, 1e-6},
    {"qwen3_5_text", "Qwen3_5ForCausalLM", Arch::qwen35, "qwen3_5", "Qwen3_5ForConditionalGeneration", false, 4, 256, 32768, 1e4, 1e-6},
    {"qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", Arch::qwen35moe, "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", false, 2, 256, 32768, 1e4, 1e-6},
};
// clang-format on

std::string known_types() {
  std::string all;
  for (const ModelType& type : kTypes) {
    all.append(all.empty() ? "" : ", ").append(type.name);
    if (type.vision != nullptr) all.append(", ").append(type.vision);
  }
  return all;
}

// The type and whether config is that of the vision model around it.
Result<std::pair<const ModelType*, bool>> type_of(const Json& config) {
  if (config.is_null()) return invalid("no config.json, expected one that tells the architecture");
  if (!config.is_object()) return invalid("config.json is not an object");
  const auto it = config.find("model_type");
  if (it == config.end() || !it->is_string())
    return invalid("config.json: no \"model_type\", expected one of " + known_types());
  const auto name = it->get<std::string>();
  for (const ModelType& type : kTypes) {
    if (name == type.name) return std::pair{&type, false};
    if (type.vision != nullptr && name == type.vision) return std::pair{&type, true};
  }
  return unsupported("config.json: model type " + in_quotes(name) +
                     " is not known, expected one of " + known_types());
}

// Types and values of rope_parameters (transformers 5) or rope_scaling, rope_theta and
// partial_rotary_factor beside it (before).
void read_rope(Fields& fields, const Json& text, ModelConfig& m) {
  const ModelType& type = *m.type;
  RopeConfig& rope = m.rope;
  rope.theta = fields.number_or("rope_theta", type.theta);
  rope.local_theta = fields.number_or("rope_local_base_freq", 1e4);
  rope.part = fields.number_or("partial_rotary_factor", gated_delta(type.arch) ? 0.25 : 1.0);
  for (const char* key : {"rope_parameters", "rope_scaling"})
    if (const Json* value = fields.find(key); value != nullptr && !value->is_object())
      fields.refuse(key, shown(*value) + ", expected an object");

  const char* where = "rope_parameters.";
  const Json* scaling = object_in(text, "rope_parameters");
  if (scaling == nullptr) {
    where = "rope_scaling.";
    scaling = object_in(text, "rope_scaling");
  }
  if (type.arch == Arch::phi3)  // which has it beside the rest
    rope.context = fields.count_or("original_max_position_embeddings", 4096);
  if (scaling == nullptr) return;
  if (const Json* local = object_in(*scaling, "sliding_attention")) {
    Fields in(*local, std::string(where) + "sliding_attention.");
    rope.local_theta = in.number_or("rope_theta", rope.local_theta);
    if (in.text_or("rope_type", "default") != "default")
      in.cannot("rope_type",
                " is not \"default\": the rotary embedding of sliding layers is not "
                "scaled by any of the other worlds");
    fields.fail(in.status());
  }
  if (const Json* full = object_in(*scaling, "full_attention")) scaling = full;
  Fields in(*scaling, where);
  rope.type = in.text_or(in.find("rope_type") == nullptr ? "type" : "rope_type", "default");
  if (rope.type == "mrope") rope.type = "default";  // of text, M-RoPE is the ordinary one
  rope.theta = in.number_or("rope_theta", rope.theta);
  rope.part = in.number_or("partial_rotary_factor", rope.part);
  if (const Json* sections = in.find("mrope_section")) {
    for (const Json& x : *sections)
      rope.sections.push_back(x.is_number_integer() ? x.get<std::int64_t>() : -1);
    const auto whole = [](std::int64_t x) { return x >= 0 && x <= kMost; };
    if (!sections->is_array() || sections->size() != 3 ||
        !std::all_of(rope.sections.begin(), rope.sections.end(), whole)) {
      in.refuse("mrope_section", shown(*sections) + ", expected three whole numbers");
    }
  }
  if (type.arch == Arch::phi3 && (rope.type == "su" || rope.type == "yarn"))
    rope.type = "longrope";  // its names in the first files
  const auto original = [&](std::int64_t otherwise) {
    return in.count_or("original_max_position_embeddings", otherwise);
  };
  if (rope.type == "linear" || rope.type == "dynamic") {
    rope.factor = in.number_or("factor", 1);
  } else if (rope.type == "yarn") {
    rope.factor = in.number_or("factor", 1);
    rope.context = original(m.context);
    const double usual = 0.1 * std::log(rope.factor) + 1;
    rope.attention = in.number_or("attention_factor", usual);
    if (std::abs(rope.attention - usual) <= 1e-6 * usual) rope.attention = 0;
    rope.beta_fast = in.number_or("beta_fast", 32);
    rope.beta_slow = in.number_or("beta_slow", 1);
    rope.mscale = in.number_or("mscale", 0);
    rope.mscale_all = in.number_or("mscale_all_dim", 0);
    rope.truncate = in.truth_or("truncate", true);
  } else if (rope.type == "llama3") {
    rope.factor = in.number_or("factor", 8);
    rope.low = in.number_or("low_freq_factor", 1);
    rope.high = in.number_or("high_freq_factor", 4);
    rope.context = original(8192);
    if (rope.high <= rope.low)
      in.refuse("high_freq_factor", std::to_string(rope.high) +
                                        ", expected more than low_freq_factor, " +
                                        std::to_string(rope.low));
  } else if (rope.type == "longrope") {
    if (type.arch != Arch::phi3 || !text.contains("original_max_position_embeddings"))
      rope.context = original(rope.context != 0 ? rope.context : m.context);
    if (rope.context < 2) in.refuse("original_max_position_embeddings", "1, expected 2 or more");
    rope.short_factors = in.numbers("short_factor", m.rotary_dim() / 2);
    rope.long_factors = in.numbers("long_factor", m.rotary_dim() / 2);
    const double scale = in.number_or("factor", double(m.context) / double(rope.context));
    const double usual = usual_longrope_attention(m.context, rope.context);
    rope.attention = in.number_or(
        "attention_factor",
        scale <= 1 ? 1 : std::sqrt(1 + std::log(scale) / std::log(double(rope.context))));
    if (std::abs(rope.attention - usual) <= 1e-6 * usual) rope.attention = 0;
  } else if (rope.type != "default") {
    in.cannot("rope_type", " " + in_quotes(rope.type) +
                               " is not supported, expected default, linear, dynamic, yarn, llama3 "
                               "or longrope");
  }
  if (type.arch == Arch::phi3 && rope.type != "default" && rope.type != "longrope")
    in.cannot("rope_type",
              " " + in_quotes(rope.type) + " does not belong to a phi3, expected longrope");
  fields.fail(in.status());
}

// The period of layer_types, whose every period-th layer is full_attention and all others `other`.
void read_period(Fields& fields, const char* other, ModelConfig& m) {
  const Json* types = fields.find("layer_types");
  if (types == nullptr) return;
  if (!types->is_array() || types->size() != static_cast<std::size_t>(m.layers)) {
    fields.refuse("layer_types", "no list of num_hidden_layers (" + std::to_string(m.layers) +
                                     ") names, expected one");
    return;
  }
  const auto type = [&](std::int64_t i) -> const Json& {
    return (*types)[static_cast<std::size_t>(i)];
  };
  const auto full = [&](std::int64_t i) { return type(i) == "full_attention"; };
  std::int64_t first = 0;
  while (first < m.layers && !full(first)) ++first;
  if (m.period == 0 || (first < m.layers || m.period <= m.layers)) m.period = first + 1;
  for (std::int64_t i = 0; i < m.layers; ++i) {
    const bool expected = (i + 1) % m.period == 0;
    if (full(i) == expected && (expected || type(i) == other)) continue;
    fields.cannot("layer_types", ": layer " + std::to_string(i) + " is " + shown(type(i)) +
                                     ", expected \"full_attention\" in the last of every " +
                                     std::to_string(m.period) + " layers and \"" + other +
                                     "\" in the others");
    return;
  }
}

void read_gated_delta(Fields& fields, ModelConfig& m) {
  m.period = fields.count_or("full_attention_interval", 4);
  read_period(fields, "linear_attention", m);
  m.conv_kernel = fields.count("linear_conv_kernel_dim");
  m.key_heads = fields.count("linear_num_key_heads");
  m.value_heads = fields.count("linear_num_value_heads");
  m.key_dim = fields.count("linear_key_head_dim");
  m.value_dim = fields.count("linear_value_head_dim");
  fields.multiple("linear_num_value_heads", m.value_heads, "linear_num_key_heads", m.key_heads);
}

void check_experts_used(Fields& fields, const ModelConfig& m) {
  if (m.experts_used > m.experts)
    fields.refuse("num_experts_per_tok", std::to_string(m.experts_used) + " of " +
                                             std::to_string(m.experts) +
                                             " experts, expected no more than there are");
}

void read_experts(Fields& fields, ModelConfig& m) {
  // transformers 5 writes either.
  m.experts =
      fields.count(fields.find("num_experts") == nullptr ? "num_local_experts" : "num_experts");
  m.experts_used = fields.count("num_experts_per_tok");
  check_experts_used(fields, m);
  m.expert_feed_forward = fields.count("moe_intermediate_size");
  if (m.gated_delta() || m.arch() == Arch::qwen2moe)
    m.shared_feed_forward = fields.count("shared_expert_intermediate_size");
  m.norm_topk = fields.truth_or("norm_topk_prob", m.gated_delta());
  m.sparse_step = fields.count_or("decoder_sparse_step", 1);
  const Json* dense = fields.find("mlp_only_layers");
  if (dense == nullptr) return;
  for (const Json& x : *dense)
    m.dense_layers.push_back(x.is_number_integer() ? x.get<std::int64_t>() : -1);
  const auto layer = [&](std::int64_t x) { return x >= 0 && x < m.layers; };
  if (!dense->is_array() || !std::all_of(m.dense_layers.begin(), m.dense_layers.end(), layer))
    fields.refuse("mlp_only_layers",
                  shown(*dense) + ", expected a list of layers below " + std::to_string(m.layers));
}

// smollm3: 1 for each layer whose heads turn.
void read_turning(Fields& fields, ModelConfig& m) {
  if (!check_sizes(m).ok()) return;  // which is said at the end
  const std::int64_t interval = fields.count_or("no_rope_layer_interval", 4);
  for (std::int64_t i = 0; i < m.layers; ++i) m.turning.push_back((i + 1) % interval != 0);
  if (const Json* list = fields.find("no_rope_layers")) {
    const auto bit = [](const Json& x) { return x == 0 || x == 1; };
    if (!list->is_array() || std::int64_t(list->size()) != m.layers ||
        !std::all_of(list->begin(), list->end(), bit)) {
      fields.refuse("no_rope_layers", shown(*list) + ", expected a 0 or 1 for each of the " +
                                          std::to_string(m.layers) + " layers");
    } else {
      for (std::size_t i = 0; i < m.turning.size(); ++i) m.turning[i] = (*list)[i] == 1;
    }
  }
  if (!fields.truth_or("use_sliding_window", false)) return;
  const Json* types = fields.find("layer_types");
  if (types == nullptr ||
      std::find(types->begin(), types->end(), "sliding_attention") != types->end())
    m.window = fields.count_or("sliding_window", 0);
}

}  // namespace

Status check_sizes(const ModelConfig& m) {
  struct Size {
    const char* what;
    std::int64_t size, most;
  };
  for (const Size& row : {
           Size{"layers", m.layers, 1 << 12},
           Size{"experts", m.experts, 1 << 12},
           Size{"tokens", m.vocab, 1 << 24},
           Size{"hidden numbers", m.hidden, 1 << 24},
           Size{"numbers of a feed forward layer",
                std::max({m.feed_forward, m.expert_feed_forward, m.shared_feed_forward}), 1 << 24},
           Size{"rows of queries", m.heads * m.head_dim, 1 << 20},
           Size{"rows of keys of the gated delta net", m.key_heads * m.key_dim, 1 << 20},
           Size{"rows of values of the gated delta net", m.value_heads * m.value_dim, 1 << 20},
           Size{"taps of its convolution", m.conv_kernel, 1 << 12},
       }) {
    if (row.size > row.most)
      return invalid("a model with " + std::to_string(row.size) + " " + row.what +
                     ", expected at most " + std::to_string(row.most));
  }
  return {};
}

const ModelType* model_type(std::string_view name) {
  for (const ModelType& type : kTypes)
    if (name == type.name) return &type;
  return nullptr;
}

const Json& text_config(const Json& config) {
  const Json* text = object_in(config, "text_config");
  return text == nullptr ? config : *text;
}

Status known_architecture(const Json& config) { return type_of(config).status(); }

Result<ModelConfig> model_from_config(const Json& config) {
  const auto known = type_of(config);
  if (!known) return known.status();
  ModelConfig m;
  m.type = known->first;
  const Json& text = text_config(config);
  m.in_vision = known->second && &text != &config;
  const bool gemma2 = m.arch() == Arch::gemma2, gemma = m.arch() == Arch::gemma3 || gemma2;

  Fields fields(text, m.in_vision ? "text_config." : "");
  m.layers = gemma ? fields.count_or("num_hidden_layers", 26) : fields.count("num_hidden_layers");
  m.hidden = fields.count("hidden_size");
  m.heads = gemma ? fields.count_or("num_attention_heads", 8) : fields.count("num_attention_heads");
  const bool all_heads = m.type->kv_heads == 0 || fields.is_null("num_key_value_heads");
  m.kv_heads = fields.count_or("num_key_value_heads", all_heads ? m.heads : m.type->kv_heads);
  m.head_dim =
      fields.count_or("head_dim", m.type->head_dim != 0 ? m.type->head_dim : m.hidden / m.heads);
  if (m.head_dim == 0) fields.refuse("hidden_size", "less than num_attention_heads");
  fields.multiple("num_attention_heads", m.heads, "num_key_value_heads", m.kv_heads);
  m.vocab =
      gemma ? fields.count_or("vocab_size", gemma2 ? 256000 : 262208) : fields.count("vocab_size");
  m.context = fields.count_or("max_position_embeddings", m.type->context);
  m.eps = fields.number_or("rms_norm_eps", m.type->eps);
  m.tied = fields.truth_or("tie_word_embeddings",
                           Fields(config).truth_or("tie_word_embeddings", m.type->tied));
  m.activation = gemma ? fields.text_or("hidden_activation", "gelu_pytorch_tanh")
                       : fields.text_or("hidden_act", "silu");
  if (m.activation != (gemma ? "gelu_pytorch_tanh" : "silu"))
    fields.cannot(gemma ? "hidden_activation" : "hidden_act",
                  " " + in_quotes(m.activation) + " is not what the other worlds compute");
  const bool narrow = m.arch() == Arch::qwen2 || m.arch() == Arch::qwen2moe || m.is("phi3");
  if (narrow && m.head_dim * m.heads != m.hidden)
    fields.cannot("head_dim",
                  " is not hidden_size / num_attention_heads, which other worlds take "
                  "it for in a " +
                      std::string(m.type->name));
  if (m.arch() != Arch::qwen35moe) m.feed_forward = fields.count("intermediate_size");
  read_rope(fields, text, m);
  if (m.rope.part > 1 || m.rotary_dim() < 2 || m.rotary_dim() % 2 != 0)
    fields.refuse("partial_rotary_factor", "one that turns " + std::to_string(m.rotary_dim()) +
                                               " of head_dim " + std::to_string(m.head_dim) +
                                               ", expected an even number up to it");

  const auto& sections = m.rope.sections;
  if (!sections.empty() && fields.status().ok() &&
      sections[0] + sections[1] + sections[2] != m.rotary_dim() / 2)
    fields.refuse("rope_parameters", "one whose mrope_section does not add up to the " +
                                         std::to_string(m.rotary_dim() / 2) + " frequencies");

  const bool bias = fields.truth_or("attention_bias", false);
  m.attention_bias = bias || m.arch() == Arch::qwen2 ||
                     (m.arch() == Arch::qwen2moe && fields.truth_or("qkv_bias", true));
  if (m.rope.part != 1 && !m.gated_delta() && m.arch() != Arch::phi3)
    fields.cannot("partial_rotary_factor",
                  " is not 1: a " + std::string(m.type->name) + " turns whole heads");
  if (m.arch() == Arch::llama || m.arch() == Arch::smollm3)
    m.mlp_bias = fields.truth_or("mlp_bias", false);
  if (m.arch() == Arch::llama) {
    if (m.is("mistral"))
      m.window = text.contains("sliding_window") ? fields.count_or("sliding_window", 0) : 4096;
    if (m.is("mixtral")) {
      m.window = fields.count_or("sliding_window", 0);
      m.experts = fields.count_or("num_local_experts", 8);
      m.experts_used = fields.count_or("num_experts_per_tok", 2);
      check_experts_used(fields, m);
      m.expert_feed_forward = m.feed_forward;
      m.norm_topk = true;
    }
  } else if (bias && m.arch() != Arch::olmo2 && m.arch() != Arch::smollm3) {
    fields.cannot("attention_bias", " is true, expected false of a " + std::string(m.type->name));
  }
  if (has_window_switch(m.arch()) && m.arch() != Arch::smollm3 &&
      fields.truth_or("use_sliding_window", false))
    fields.cannot("use_sliding_window", " is true, which no other world has for this model");
  if (gemma) {
    m.window = fields.is_null("sliding_window") ? 0 : fields.count_or("sliding_window", 4096);
    m.period = fields.count_or("sliding_window_pattern",
                               fields.count_or("_sliding_window_pattern", gemma2 ? 2 : 6));
    read_period(fields, "sliding_attention", m);
    if (m.period == 1) m.window = 0;  // no layer has it, and llama.cpp wants one that does
    m.query_scale = fields.number_or("query_pre_attn_scalar", 256);
    const auto softcap = [&](const char* key, double otherwise) {
      return fields.is_null(key) ? 0 : fields.number_or(key, gemma2 ? otherwise : 0);
    };
    m.logit_softcap = softcap("final_logit_softcapping", 30);
    m.attention_softcap = softcap("attn_logit_softcapping", 50);
    if (!gemma2 && m.attention_softcap != 0)
      fields.cannot("attn_logit_softcapping", " is not null");
    if (fields.truth_or("use_bidirectional_attention", false))
      fields.cannot("use_bidirectional_attention", " is true");
  }
  if (m.arch() == Arch::phi3) m.window = fields.count_or("sliding_window", 0);
  if (m.arch() == Arch::smollm3) read_turning(fields, m);
  if (m.gated_delta()) read_gated_delta(fields, m);
  if (m.arch() == Arch::qwen2moe || m.arch() == Arch::qwen3moe || m.arch() == Arch::qwen3next ||
      m.arch() == Arch::qwen35moe)
    read_experts(fields, m);
  fields.fail(check_sizes(m));
  if (!fields.status().ok()) return fields.status();
  m.unread = fields.unread();
  return m;
}

}  // namespace bittern
