#include "convert/tiny_models_test.h"

#include <gtest/gtest.h>

#include <cmath>
#include <sstream>
#include <utility>

namespace bittern::tiny_models {
namespace {

constexpr const char* kEnds =
    "model.embed_tokens.weight 10 8\nmodel.norm.weight 8\nlm_head.weight 10 8\n";
constexpr const char* kTied = "model.embed_tokens.weight 10 8\nmodel.norm.weight 8\n";
constexpr const char* kAttention =
    "self_attn.q_proj.weight 16 8\nself_attn.k_proj.weight 8 8\nself_attn.v_proj.weight 8 8\n"
    "self_attn.o_proj.weight 8 16\n";
constexpr const char* kNarrow =
    "self_attn.q_proj.weight 8 8\nself_attn.k_proj.weight 4 8\nself_attn.v_proj.weight 4 8\n"
    "self_attn.o_proj.weight 8 8\n";
constexpr const char* kHeadNorms =
    "self_attn.q_proj.weight 16 8\nself_attn.k_proj.weight 8 8\nself_attn.v_proj.weight 8 8\n"
    "self_attn.o_proj.weight 8 16\nself_attn.q_norm.weight 4\nself_attn.k_norm.weight 4\n";
constexpr const char* kGatedAttention =
    "self_attn.q_proj.weight 64 8\nself_attn.k_proj.weight 16 8\nself_attn.v_proj.weight 16 8\n"
    "self_attn.o_proj.weight 8 32\nself_attn.q_norm.weight 8\nself_attn.k_norm.weight 8\n";
constexpr const char* kMlp =
    "input_layernorm.weight 8\npost_attention_layernorm.weight 8\nmlp.gate_proj.weight 6 8\n"
    "mlp.up_proj.weight 6 8\nmlp.down_proj.weight 8 6\n";
constexpr const char* kDeltaCommon =
    "linear_attn.A_log 6\nlinear_attn.dt_bias 6\nlinear_attn.conv1d.weight 20 1 4\n"
    "linear_attn.norm.weight 2\nlinear_attn.out_proj.weight 8 12\n";
const std::string kDelta35 =
    std::string(kDeltaCommon) +
    "linear_attn.in_proj_qkv.weight 20 8\nlinear_attn.in_proj_z.weight 12 8\n"
    "linear_attn.in_proj_a.weight 6 8\nlinear_attn.in_proj_b.weight 6 8\n";
const std::string kDeltaNext = std::string(kDeltaCommon) +
                               "linear_attn.in_proj_qkvz.weight 32 8\n"
                               "linear_attn.in_proj_ba.weight 12 8\n";
constexpr const char* kSharedMlp =
    "input_layernorm.weight 8\npost_attention_layernorm.weight 8\nmlp.gate.weight 3 8\n"
    "mlp.shared_expert.gate_proj.weight 5 8\nmlp.shared_expert.up_proj.weight 5 8\n"
    "mlp.shared_expert.down_proj.weight 8 5\nmlp.shared_expert_gate.weight 1 8\n";
constexpr const char* kExperts =
    "mlp.experts.E.gate_proj.weight 6 8\nmlp.experts.E.up_proj.weight 6 8\n"
    "mlp.experts.E.down_proj.weight 8 6\n";

#define DELTA_KEYS                                                                        \
  "\"linear_conv_kernel_dim\":4,\"linear_num_key_heads\":2,\"linear_num_value_heads\":6," \
  "\"linear_key_head_dim\":2,\"linear_value_head_dim\":2,"                                \
  "\"layer_types\":[\"linear_attention\",\"full_attention\"]"
#define EXPERT_KEYS                                                          \
  "\"num_experts\":3,\"num_experts_per_tok\":2,\"moe_intermediate_size\":6," \
  "\"shared_expert_intermediate_size\":5"
#define SIZES \
  "\"vocab_size\":10,\"hidden_size\":8,\"num_hidden_layers\":2,\"num_attention_heads\":4"

}  // namespace

const std::vector<Tiny>& tiny() {
  static const std::string biases =
      std::string(kAttention) +
      "self_attn.q_proj.bias 16\nself_attn.k_proj.bias 8\nself_attn.v_proj.bias 8\n";
  static const std::string llama_biases = biases + "self_attn.o_proj.bias 8\n";
  static const std::string llama_mlp =
      std::string(kMlp) + "mlp.gate_proj.bias 6\nmlp.up_proj.bias 6\nmlp.down_proj.bias 8\n";
  static const std::string qwen2 =
      std::string(kNarrow) +
      "self_attn.q_proj.bias 8\nself_attn.k_proj.bias 4\nself_attn.v_proj.bias 4\n";
  static const std::string olmo_attention =
      std::string(kNarrow) + "self_attn.q_norm.weight 8\nself_attn.k_norm.weight 4\n";
  static const std::string gemma_mlp =
      std::string(kMlp) +
      "pre_feedforward_layernorm.weight 8\npost_feedforward_layernorm.weight 8\n";
  static const std::vector<Tiny> all = {
      {"llama",
       R"({"model_type":"llama","intermediate_size":6,"num_key_value_heads":2,"head_dim":4,)" SIZES
       R"(,"attention_bias":true,"mlp_bias":true,"tie_word_embeddings":true,
        "max_position_embeddings":512,"rms_norm_eps":1e-5,"rope_theta":500000.0,
        "rope_scaling":{"rope_type":"linear","factor":2.0}})",
       kTied, llama_biases.c_str(), "", llama_mlp.c_str()},
      {"mistral",
       R"({"model_type":"mistral","intermediate_size":6,"num_key_value_heads":2,"head_dim":4,)" SIZES
       R"(,"sliding_window":4096})",
       kEnds, kAttention, "", kMlp},
      {"mixtral",
       R"({"model_type":"mixtral","intermediate_size":6,"num_key_value_heads":2,)" SIZES
       R"(,"num_local_experts":3,"num_experts_per_tok":2})",
       kEnds, kNarrow, "",
       "input_layernorm.weight 8\npost_attention_layernorm.weight 8\n"
       "block_sparse_moe.gate.weight 3 8\n",
       "block_sparse_moe.experts.E.w1.weight 6 8\nblock_sparse_moe.experts.E.w3.weight 6 8\n"
       "block_sparse_moe.experts.E.w2.weight 8 6\n"},
      {"qwen2",
       R"({"model_type":"qwen2","intermediate_size":6,"num_key_value_heads":2,)" SIZES
       R"(,"rope_parameters":{"rope_type":"yarn","rope_theta":1e6,"factor":4.0,
        "original_max_position_embeddings":128}})",
       kEnds, qwen2.c_str(), "", kMlp},
      {"qwen3",
       R"({"model_type":"qwen3","intermediate_size":6,"num_key_value_heads":2,"head_dim":4,)" SIZES
       R"(,"tie_word_embeddings":true,"rope_theta":1000000})",
       kTied, kHeadNorms, "", kMlp},
      {"qwen3moe",
       R"({"model_type":"qwen3_moe","intermediate_size":7,"num_key_value_heads":2,"head_dim":4,)" SIZES
       R"(,"num_experts":3,"num_experts_per_tok":2,"moe_intermediate_size":6,"norm_topk_prob":true})",
       kEnds, kHeadNorms, "",
       "input_layernorm.weight 8\npost_attention_layernorm.weight 8\nmlp.gate.weight 3 8\n",
       kExperts},
      {"gemma3",
       R"({"model_type":"gemma3_text","intermediate_size":6,"num_key_value_heads":2,"head_dim":4,)" SIZES
       R"(,"query_pre_attn_scalar":4,"sliding_window":16,
        "layer_types":["sliding_attention","full_attention"],
        "rope_parameters":{"full_attention":{"rope_type":"linear","factor":8.0,"rope_theta":1e6},
        "sliding_attention":{"rope_type":"default","rope_theta":20000.0}}})",
       kTied, kHeadNorms, "", gemma_mlp.c_str()},
      {"phi3",
       R"({"model_type":"phi3","intermediate_size":6,"num_key_value_heads":2,)" SIZES
       R"(,"max_position_embeddings":128,"original_max_position_embeddings":64,
        "sliding_window":32,"rms_norm_eps":1e-5,
        "rope_scaling":{"type":"longrope","short_factor":[1.05],"long_factor":[1.7]}})",
       kEnds, "self_attn.qkv_proj.weight 16 8\nself_attn.o_proj.weight 8 8\n", "",
       "input_layernorm.weight 8\npost_attention_layernorm.weight 8\n"
       "mlp.gate_up_proj.weight 12 8\nmlp.down_proj.weight 8 6\n"},
      {"olmo2",
       R"({"model_type":"olmo2","intermediate_size":6,"num_key_value_heads":2,)" SIZES
       R"(,"rope_theta":500000})",
       kEnds, olmo_attention.c_str(), "",
       "post_attention_layernorm.weight 8\npost_feedforward_layernorm.weight 8\n"
       "mlp.gate_proj.weight 6 8\nmlp.up_proj.weight 6 8\nmlp.down_proj.weight 8 6\n"},
      {"smollm3",
       R"({"model_type":"smollm3","intermediate_size":6,"num_key_value_heads":2,"head_dim":4,)" SIZES
       R"(,"rope_theta":5000000.0})",
       kTied, kAttention, "", kMlp},
      {"gemma2",
       R"({"model_type":"gemma2","intermediate_size":6,"num_key_value_heads":2,"head_dim":4,)" SIZES
       R"(,"query_pre_attn_scalar":4,"sliding_window":16,"attn_logit_softcapping":40.0,
        "final_logit_softcapping":20.5})",
       kTied, kAttention, "", gemma_mlp.c_str()},
      {"qwen2moe",
       R"({"model_type":"qwen2_moe","intermediate_size":7,"num_key_value_heads":2,)" SIZES
       "," EXPERT_KEYS R"(,"norm_topk_prob":false})",
       kEnds, qwen2.c_str(), "", kSharedMlp, kExperts},
      {"qwen3next",
       R"({"model_type":"qwen3_next","intermediate_size":6,"num_key_value_heads":2,"head_dim":8,)" SIZES
       "," DELTA_KEYS "," EXPERT_KEYS R"(,"partial_rotary_factor":0.5})",
       kEnds, kGatedAttention, kDeltaNext.c_str(), kSharedMlp, kExperts},
      {"qwen35",
       R"({"model_type":"qwen3_5_text","intermediate_size":6,"num_key_value_heads":2,"head_dim":8,)" SIZES
       "," DELTA_KEYS
       R"(,"tie_word_embeddings":true,"rope_parameters":{"rope_type":"default","rope_theta":1e7,
        "partial_rotary_factor":0.25}})",
       kTied, kGatedAttention, kDelta35.c_str(), kMlp},
      {"qwen35moe",
       R"({"model_type":"qwen3_5_moe_text","num_key_value_heads":2,"head_dim":8,)" SIZES
       "," DELTA_KEYS "," EXPERT_KEYS
       R"(,"rope_parameters":{"rope_type":"default","rope_theta":1e7,"partial_rotary_factor":0.75,
        "mrope_section":[1,1,1]}})",
       kEnds, kGatedAttention, kDelta35.c_str(), kSharedMlp, kExperts},
  };
  return all;
}

const Tiny& tiny(std::string_view name) {
  for (const Tiny& model : tiny())
    if (name == model.name) return model;
  ADD_FAILURE() << name;
  return tiny().front();
}

Json config_of(const Tiny& model) { return Json::parse(model.config, nullptr, false); }
Json config_of(std::string_view name) { return config_of(tiny(name)); }

Json vision(std::string_view type, const Json& text) {
  Json config;
  config["model_type"] = type;
  config["text_config"] = text;
  return config;
}

void add_shapes(const std::string& text, const std::string& prefix, std::vector<NamedShape>& out) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    NamedShape tensor;
    words >> tensor.name;
    tensor.name = prefix + tensor.name;
    for (std::int64_t dim = 0; words >> dim;) tensor.shape[tensor.shape.rank++] = dim;
    out.push_back(std::move(tensor));
  }
}

std::vector<NamedShape> hf_tensors(const Tiny& model) {
  std::vector<NamedShape> all;
  add_shapes(model.once, "", all);
  for (int layer = 0; layer < 2; ++layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    const bool delta = *model.delta != 0 && layer == 0;
    add_shapes(delta ? model.delta : model.attention, prefix, all);
    add_shapes(model.mlp, prefix, all);
    for (int e = 0; e < 3 && *model.experts != 0; ++e) {
      std::string text = model.experts;
      for (std::size_t at; (at = text.find(".E.")) != text.npos;)
        text.replace(at, 3, "." + std::to_string(e) + ".");
      add_shapes(text, prefix, all);
    }
  }
  return all;
}

Tensors numbered(const std::vector<NamedShape>& shapes) {
  Tensors all;
  float next = -4;
  for (const NamedShape& tensor : shapes) {
    Values values{tensor.shape, std::vector<float>(std::size_t(tensor.shape.numel()))};
    for (float& x : values.data) x = next += 1.0f / 1024;
    all[tensor.name] = std::move(values);
  }
  return all;
}

std::vector<NamedShape> shapes_of(const Tensors& tensors) {
  std::vector<NamedShape> all;
  for (const auto& [name, values] : tensors) all.push_back({name, values.shape});
  return all;
}

namespace {

float mapped(ValueMap map, float x) {
  switch (map) {
    case ValueMap::same: return x;
    case ValueMap::plus_one: return x + 1;
    case ValueMap::minus_one: return x - 1;
    case ValueMap::negative_exp: return -std::exp(x);
    case ValueMap::log_negative: return std::log(-x);
  }
  return 0;
}

}  // namespace

Tensors carried_out(const Renaming& renaming, const Tensors& from) {
  Tensors all;
  for (const Recipe& recipe : renaming.tensors) {
    std::vector<float> data = recipe.values;
    if (!recipe.sources.empty() && recipe.rows.empty()) data = from.at(recipe.sources[0]).data;
    for (const RowRun& run : recipe.rows) {
      const std::vector<float>& source = from.at(recipe.sources[run.source]).data;
      for (std::int64_t i = 0; i < run.count; ++i) {
        const auto row = source.begin() + (run.first + i * run.step) * recipe.width;
        data.insert(data.end(), row, row + recipe.width);
      }
    }
    if (!recipe.columns.empty()) {
      const std::vector<float> before = data;
      const auto block = std::size_t(recipe.column_block), count = recipe.columns.size();
      for (std::size_t i = 0; i < data.size(); ++i) {
        const std::size_t row = i / (block * count), b = i / block % count;
        data[i] = before[(row * count + std::size_t(recipe.columns[b])) * block + i % block];
      }
    }
    for (float& x : data) x = mapped(recipe.map, x);
    EXPECT_EQ(std::int64_t(data.size()), recipe.shape.numel()) << recipe.name;
    EXPECT_FALSE(all.contains(recipe.name)) << recipe.name;
    all[recipe.name] = {recipe.shape, std::move(data)};
  }
  return all;
}

Tensors renamed(const Json& config, const Tensors& tensors, World from, World to) {
  const auto renaming = rename_tensors(config, shapes_of(tensors), from, to);
  EXPECT_TRUE(renaming.ok()) << renaming.status().message();
  return renaming ? carried_out(*renaming, tensors) : Tensors{};
}

void expect_same(const Tensors& a, const Tensors& b) {
  for (const auto& [name, values] : a) {
    const auto found = b.find(name);
    if (found == b.end()) {
      ADD_FAILURE() << name << " is missing";
      continue;
    }
    EXPECT_EQ(values.shape, found->second.shape) << name;
    const bool logarithm = name.ends_with("A_log");  // of an exponential
    for (std::size_t i = 0; i < values.data.size(); ++i)
      ASSERT_NEAR(values.data[i], found->second.data[i], logarithm ? 1e-6 : 0) << name;
  }
  EXPECT_EQ(a.size(), b.size());
}

}  // namespace bittern::tiny_models
