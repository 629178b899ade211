#include "convert/architecture.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <numeric>
#include <sstream>

#include "convert/model.h"
#include "formats/test_folder.h"

namespace bittern {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

// ---- tiny models: what transformers 5.22 saves ----

struct Tiny {
  const char* name;
  const char* config;
  const char* once;       // names and shapes
  const char* attention;  // of a layer with full attention
  const char* delta;      // of a gated delta net
  const char* mlp;        // of both
  const char* experts = "";
};

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

// ---- recipes carried out, one number after the other ----

struct Values {
  Shape shape;
  std::vector<float> data;
};
using Tensors = std::map<std::string, Values>;

// Numbers that all differ, and whose +1 is exact.
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

std::string refused(const Json& config, const Tensors& tensors, World from, World to) {
  return std::string(rename_tensors(config, shapes_of(tensors), from, to).status().message());
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

std::vector<float> rows(const Values& values, std::initializer_list<std::int64_t> which) {
  const std::int64_t width = values.shape[values.shape.rank - 1];
  std::vector<float> out;
  for (const std::int64_t row : which)
    out.insert(out.end(), values.data.begin() + row * width,
               values.data.begin() + (row + 1) * width);
  return out;
}

// ---- names and moves ----

TEST(Architecture, EveryWayRoundEndsWhereItBegan) {
  for (const Tiny& model : tiny()) {
    SCOPED_TRACE(model.name);
    const Json config = config_of(model);
    const auto mlx_config = config_for(World::mlx, config);
    ASSERT_TRUE(mlx_config.ok()) << mlx_config.status().message();
    const Tensors hf = numbered(hf_tensors(model));
    const Tensors gguf = renamed(config, hf, World::hf, World::gguf);
    const Tensors mlx = renamed(config, hf, World::hf, World::mlx);
    expect_same(hf, renamed(config, gguf, World::gguf, World::hf));
    expect_same(hf, renamed(*mlx_config, mlx, World::mlx, World::hf));
    expect_same(gguf, renamed(*mlx_config, mlx, World::mlx, World::gguf));
    expect_same(mlx, renamed(config, gguf, World::gguf, World::mlx));
    expect_same(hf, renamed(config, hf, World::hf, World::hf));
  }
}

TEST(Architecture, TheWorldOfAFolderShowsInItsShapes) {
  for (const Tiny& model : tiny()) {
    const Json config = config_of(model);
    const Tensors hf = numbered(hf_tensors(model));
    EXPECT_EQ(world_of_folder(shapes_of(hf)), World::hf);
    const bool differs = *model.delta != 0 || *model.experts != 0;
    EXPECT_EQ(world_of_folder(shapes_of(renamed(config, hf, World::hf, World::mlx))),
              differs ? World::mlx : World::hf)
        << model.name;
  }
}

std::string names(const Tensors& tensors, std::string_view prefix) {
  std::string all;
  for (const auto& [name, values] : tensors)
    if (name.starts_with(prefix)) all += name.substr(prefix.size()) + values.shape.str() + " ";
  return all;
}

TEST(Architecture, NamesOfLlamaCpp) {
  const auto gguf = [](std::string_view name) {
    return renamed(config_of(name), numbered(hf_tensors(tiny(name))), World::hf, World::gguf);
  };
  EXPECT_EQ(names(gguf("llama"), "blk.1."),
            "attn_k.bias[8] attn_k.weight[8,8] attn_norm.weight[8] attn_output.bias[8] "
            "attn_output.weight[8,16] attn_q.bias[16] attn_q.weight[16,8] attn_v.bias[8] "
            "attn_v.weight[8,8] ffn_down.bias[8] ffn_down.weight[8,6] ffn_gate.bias[6] "
            "ffn_gate.weight[6,8] ffn_norm.weight[8] ffn_up.bias[6] ffn_up.weight[6,8] ");
  EXPECT_EQ(names(gguf("mixtral"), "blk.0.ffn"),
            "_down_exps.weight[3,8,6] _gate_exps.weight[3,6,8] _gate_inp.weight[3,8] "
            "_norm.weight[8] _up_exps.weight[3,6,8] ");
  EXPECT_EQ(names(gguf("gemma3"), "blk.0."),
            "attn_k.weight[8,8] attn_k_norm.weight[4] attn_norm.weight[8] "
            "attn_output.weight[8,16] attn_q.weight[16,8] attn_q_norm.weight[4] "
            "attn_v.weight[8,8] ffn_down.weight[8,6] ffn_gate.weight[6,8] ffn_norm.weight[8] "
            "ffn_up.weight[6,8] post_attention_norm.weight[8] post_ffw_norm.weight[8] ");
  EXPECT_EQ(names(gguf("qwen3next"), "blk.0."),
            "attn_gate.weight[12,8] attn_norm.weight[8] attn_qkv.weight[20,8] "
            "ffn_down_exps.weight[3,8,6] ffn_down_shexp.weight[8,5] ffn_gate_exps.weight[3,6,8] "
            "ffn_gate_inp.weight[3,8] ffn_gate_inp_shexp.weight[8] ffn_gate_shexp.weight[5,8] "
            "ffn_up_exps.weight[3,6,8] ffn_up_shexp.weight[5,8] post_attention_norm.weight[8] "
            "ssm_a[6] ssm_ba.weight[12,8] ssm_conv1d.weight[20,4] ssm_dt.bias[6] "
            "ssm_norm.weight[2] ssm_out.weight[8,12] ");
  EXPECT_EQ(names(gguf("qwen35"), "blk.0."),
            "attn_gate.weight[12,8] attn_norm.weight[8] attn_qkv.weight[20,8] "
            "ffn_down.weight[8,6] ffn_gate.weight[6,8] ffn_up.weight[6,8] "
            "post_attention_norm.weight[8] ssm_a[6] ssm_alpha.weight[6,8] ssm_beta.weight[6,8] "
            "ssm_conv1d.weight[20,4] ssm_dt.bias[6] ssm_norm.weight[2] ssm_out.weight[8,12] ");
  EXPECT_EQ(names(gguf("qwen35"), "blk.1.attn"),
            "_k.weight[16,8] _k_norm.weight[8] _norm.weight[8] _output.weight[8,32] "
            "_q.weight[64,8] _q_norm.weight[8] _v.weight[16,8] ");
  EXPECT_EQ(names(gguf("phi3"), "blk.0."),
            "attn_norm.weight[8] attn_output.weight[8,8] attn_qkv.weight[16,8] "
            "ffn_down.weight[8,6] ffn_norm.weight[8] ffn_up.weight[12,8] ");
  EXPECT_EQ(names(gguf("phi3"), "rope"), "_factors_long.weight[1] _factors_short.weight[1] ");
  EXPECT_EQ(names(gguf("olmo2"), "blk.0."),
            "attn_k.weight[4,8] attn_k_norm.weight[4] attn_output.weight[8,8] attn_q.weight[8,8] "
            "attn_q_norm.weight[8] attn_v.weight[4,8] ffn_down.weight[8,6] ffn_gate.weight[6,8] "
            "ffn_up.weight[6,8] post_attention_norm.weight[8] post_ffw_norm.weight[8] ");
  EXPECT_EQ(names(gguf("gemma2"), "blk.0."),
            "attn_k.weight[8,8] attn_norm.weight[8] attn_output.weight[8,16] attn_q.weight[16,8] "
            "attn_v.weight[8,8] ffn_down.weight[8,6] ffn_gate.weight[6,8] ffn_norm.weight[8] "
            "ffn_up.weight[6,8] post_attention_norm.weight[8] post_ffw_norm.weight[8] ");
  EXPECT_EQ(names(gguf("qwen2moe"), "blk.0.ffn"),
            "_down_exps.weight[3,8,6] _down_shexp.weight[8,5] _gate_exps.weight[3,6,8] "
            "_gate_inp.weight[3,8] _gate_inp_shexp.weight[8] _gate_shexp.weight[5,8] "
            "_norm.weight[8] _up_exps.weight[3,6,8] _up_shexp.weight[5,8] ");
  EXPECT_EQ(names(gguf("smollm3"), "o"), "utput_norm.weight[8] ");
  EXPECT_EQ(names(gguf("qwen3"), "o"), "utput_norm.weight[8] ");
  EXPECT_EQ(names(gguf("mistral"), "o"), "utput.weight[10,8] utput_norm.weight[8] ");
  EXPECT_EQ(names(gguf("mistral"), "t"), "oken_embd.weight[10,8] ");
}

TEST(Architecture, NamesOfMlxLm) {
  const auto mlx = [](std::string_view name) {
    return renamed(config_of(name), numbered(hf_tensors(tiny(name))), World::hf, World::mlx);
  };
  EXPECT_EQ(names(mlx("mixtral"), "model.layers.0.block_sparse_moe."),
            "gate.weight[3,8] switch_mlp.down_proj.weight[3,8,6] "
            "switch_mlp.gate_proj.weight[3,6,8] switch_mlp.up_proj.weight[3,6,8] ");
  EXPECT_EQ(names(mlx("qwen3next"), "model.layers.0.linear_attn."),
            "A_log[6] conv1d.weight[20,4,1] dt_bias[6] in_proj_ba.weight[12,8] "
            "in_proj_qkvz.weight[32,8] norm.weight[2] out_proj.weight[8,12] ");
  EXPECT_EQ(names(mlx("qwen35moe"), "language_model.l"), "m_head.weight[10,8] ");
  EXPECT_EQ(names(mlx("qwen35moe"), "language_model.model.layers.1.mlp."),
            "gate.weight[3,8] shared_expert.down_proj.weight[8,5] "
            "shared_expert.gate_proj.weight[5,8] shared_expert.up_proj.weight[5,8] "
            "shared_expert_gate.weight[1,8] switch_mlp.down_proj.weight[3,8,6] "
            "switch_mlp.gate_proj.weight[3,6,8] switch_mlp.up_proj.weight[3,6,8] ");
}

TEST(Architecture, LlamaCppHasRotaryPairsAsNeighbours) {
  const Tensors hf = numbered(hf_tensors(tiny("llama")));
  const Tensors gguf = renamed(config_of("llama"), hf, World::hf, World::gguf);
  const Values& k = hf.at("model.layers.1.self_attn.k_proj.weight");  // two heads of 4
  EXPECT_EQ(gguf.at("blk.1.attn_k.weight").data, rows(k, {0, 2, 1, 3, 4, 6, 5, 7}));
  const std::vector<float>& bias = hf.at("model.layers.1.self_attn.k_proj.bias").data;
  EXPECT_EQ(gguf.at("blk.1.attn_k.bias").data,
            (std::vector{bias[0], bias[2], bias[1], bias[3], bias[4], bias[6], bias[5], bias[7]}));
  EXPECT_EQ(gguf.at("blk.1.attn_v.weight").data,
            hf.at("model.layers.1.self_attn.v_proj.weight").data);
  // Whole runs: a head is two of them on the way back.
  const auto back = rename_tensors(config_of("llama"), shapes_of(gguf), World::gguf, World::hf);
  ASSERT_TRUE(back.ok());
  for (const Recipe& recipe : back->tensors) {
    if (recipe.name != "model.layers.0.self_attn.q_proj.weight") continue;
    EXPECT_EQ(recipe.rows.size(), 8u);
    EXPECT_EQ(recipe.rows[1].first, 1);
    EXPECT_EQ(recipe.rows[1].count, 2);
    EXPECT_EQ(recipe.rows[1].step, 2);
    EXPECT_EQ(recipe.width, 8);
  }
}

TEST(Architecture, OnlyWhatMovesHasRows) {
  const auto renaming =
      rename_tensors(config_of("qwen3"), hf_tensors(tiny("qwen3")), World::hf, World::gguf);
  ASSERT_TRUE(renaming.ok());
  for (const Recipe& recipe : renaming->tensors) {
    EXPECT_TRUE(recipe.rows.empty() && recipe.columns.empty()) << recipe.name;
    EXPECT_EQ(recipe.sources.size(), 1u);
    EXPECT_EQ(recipe.map, ValueMap::same);
  }
}

TEST(Architecture, NormsHaveTheirOneFoldedIn) {
  const auto difference = [](std::string_view model, World world, const std::string& there,
                             const std::string& here) {
    const Tensors hf = numbered(hf_tensors(tiny(model)));
    const Tensors other = renamed(config_of(model), hf, World::hf, world);
    return other.at(there).data[1] - hf.at(here).data[1];
  };
  const std::string input = "model.layers.0.input_layernorm.weight";
  EXPECT_EQ(difference("qwen3", World::gguf, "blk.0.attn_norm.weight", input), 0);
  EXPECT_EQ(difference("gemma3", World::gguf, "blk.0.attn_norm.weight", input), 1);
  EXPECT_EQ(difference("gemma3", World::gguf, "blk.0.attn_q_norm.weight",
                       "model.layers.0.self_attn.q_norm.weight"),
            1);
  EXPECT_EQ(difference("gemma3", World::mlx, input, input), 0);
  EXPECT_EQ(difference("gemma2", World::gguf, "blk.0.post_ffw_norm.weight",
                       "model.layers.0.post_feedforward_layernorm.weight"),
            1);
  EXPECT_EQ(difference("gemma2", World::mlx, input, input), 0);
  EXPECT_EQ(difference("olmo2", World::gguf, "blk.0.attn_q_norm.weight",
                       "model.layers.0.self_attn.q_norm.weight"),
            0);
  EXPECT_EQ(difference("qwen3next", World::gguf, "output_norm.weight", "model.norm.weight"), 1);
  EXPECT_EQ(difference("qwen3next", World::mlx, input, input), 1);
  EXPECT_EQ(difference("qwen3next", World::gguf, "blk.0.ssm_norm.weight",
                       "model.layers.0.linear_attn.norm.weight"),
            0);
  EXPECT_EQ(difference("qwen35", World::mlx, "language_model." + input, input), 1);
}

TEST(Architecture, QwenNextFusesPerKeyHead) {
  const Tensors hf = numbered(hf_tensors(tiny("qwen3next")));
  const Tensors gguf = renamed(config_of("qwen3next"), hf, World::hf, World::gguf);
  // Two key heads of 2 with 3 value heads of 2 each: q 2, k 2, v 6, z 6 rows a key head.
  const Values& qkvz = hf.at("model.layers.0.linear_attn.in_proj_qkvz.weight");
  EXPECT_EQ(gguf.at("blk.0.attn_qkv.weight").data,
            rows(qkvz, {0, 1, 16, 17, 2, 3, 18, 19, 4, 5, 6, 7, 8, 9, 20, 21, 22, 23, 24, 25}));
  EXPECT_EQ(gguf.at("blk.0.attn_gate.weight").data,
            rows(qkvz, {10, 11, 12, 13, 14, 15, 26, 27, 28, 29, 30, 31}));
  EXPECT_EQ(gguf.at("blk.0.ssm_ba.weight").data,
            hf.at("model.layers.0.linear_attn.in_proj_ba.weight").data);
  EXPECT_EQ(gguf.at("blk.0.ssm_dt.bias").data, hf.at("model.layers.0.linear_attn.dt_bias").data);
  EXPECT_EQ(gguf.at("blk.0.ssm_a").data[2],
            -std::exp(hf.at("model.layers.0.linear_attn.A_log").data[2]));
}

TEST(Architecture, Qwen35HasItsValueHeadsInTurns) {
  const Tensors hf = numbered(hf_tensors(tiny("qwen35")));
  const Tensors gguf = renamed(config_of("qwen35"), hf, World::hf, World::gguf);
  const std::string at = "model.layers.0.linear_attn.";
  // Heads 0 1 2 | 3 4 5 of two key heads become 0 3 1 4 2 5.
  EXPECT_EQ(gguf.at("blk.0.ssm_beta.weight").data,
            rows(hf.at(at + "in_proj_b.weight"), {0, 3, 1, 4, 2, 5}));
  EXPECT_EQ(gguf.at("blk.0.ssm_alpha.weight").data,
            rows(hf.at(at + "in_proj_a.weight"), {0, 3, 1, 4, 2, 5}));
  EXPECT_EQ(gguf.at("blk.0.attn_gate.weight").data,
            rows(hf.at(at + "in_proj_z.weight"), {0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11}));
  EXPECT_EQ(gguf.at("blk.0.attn_qkv.weight").data,
            rows(hf.at(at + "in_proj_qkv.weight"),
                 {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 14, 15, 10, 11, 16, 17, 12, 13, 18, 19}));
  EXPECT_EQ(gguf.at("blk.0.ssm_conv1d.weight").data,
            rows(hf.at(at + "conv1d.weight"),
                 {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 14, 15, 10, 11, 16, 17, 12, 13, 18, 19}));
  const std::vector<float>& dt = hf.at(at + "dt_bias").data;
  EXPECT_EQ(gguf.at("blk.0.ssm_dt.bias").data,
            (std::vector{dt[0], dt[3], dt[1], dt[4], dt[2], dt[5]}));
  const std::vector<float>& out = hf.at(at + "out_proj.weight").data;  // of rows of 12
  const std::vector<float>& moved = gguf.at("blk.0.ssm_out.weight").data;
  for (const int row : {0, 7})
    for (int c = 0; c < 12; ++c) {
      constexpr int kHead[] = {0, 3, 1, 4, 2, 5};
      EXPECT_EQ(moved[std::size_t(12 * row + c)],
                out[std::size_t(12 * row + 2 * kHead[c / 2] + c % 2)]);
    }
}

TEST(Architecture, OtherFormsAreRead) {
  // Experts as transformers has them in memory.
  const Json config = config_of("qwen35moe");
  const Tensors hf = numbered(hf_tensors(tiny("qwen35moe")));
  Tensors fused = hf;
  for (int layer = 0; layer < 2; ++layer) {
    const std::string mlp = "model.layers." + std::to_string(layer) + ".mlp.experts";
    Values both{{3, 12, 8}, {}}, down{{3, 8, 6}, {}};
    for (int e = 0; e < 3; ++e) {
      const std::string expert = mlp + "." + std::to_string(e) + ".";
      for (const char* part : {"gate_proj.weight", "up_proj.weight", "down_proj.weight"}) {
        const auto found = fused.find(expert + part);
        Values& to = part == std::string_view("down_proj.weight") ? down : both;
        to.data.insert(to.data.end(), found->second.data.begin(), found->second.data.end());
        fused.erase(found);
      }
    }
    fused[mlp + ".gate_up_proj"] = both;
    fused[mlp + ".down_proj"] = down;
  }
  const Tensors gguf = renamed(config, hf, World::hf, World::gguf);
  expect_same(gguf, renamed(config, fused, World::hf, World::gguf));

  // llama.cpp's stack of gate and up.
  Tensors stacked = gguf;
  for (int layer = 0; layer < 2; ++layer) {
    const std::string blk = "blk." + std::to_string(layer) + ".";
    stacked[blk + "ffn_gate_up_exps.weight"] =
        fused.at("model.layers." + std::to_string(layer) + ".mlp.experts.gate_up_proj");
    stacked.erase(blk + "ffn_gate_exps.weight");
    stacked.erase(blk + "ffn_up_exps.weight");
  }
  expect_same(hf, renamed(config, stacked, World::gguf, World::hf));

  // llama.cpp's first files of qwen3next.
  const Tensors next = numbered(hf_tensors(tiny("qwen3next")));
  Tensors legacy = renamed(config_of("qwen3next"), next, World::hf, World::gguf);
  legacy["blk.0.ssm_in.weight"] = next.at("model.layers.0.linear_attn.in_proj_qkvz.weight");
  EXPECT_EQ(refused(config_of("qwen3next"), legacy, World::gguf, World::hf),
            "tensors \"blk.0.attn_qkv.weight\" and \"blk.0.ssm_in.weight\" hold the same weights, "
            "expected one of them");
  legacy.erase("blk.0.attn_qkv.weight");
  legacy.erase("blk.0.attn_gate.weight");
  expect_same(next, renamed(config_of("qwen3next"), legacy, World::gguf, World::hf));
}

Json vision(std::string_view type, const Json& text) {
  Json config;
  config["model_type"] = type;
  config["text_config"] = text;
  return config;
}

TEST(Architecture, OfAVisionModelTheLanguageModelIsTaken) {
  for (const auto& [name, type, prefix] :
       {std::tuple{"gemma3", "gemma3", "language_model.model."},
        std::tuple{"gemma3", "gemma3", "model.language_model."},
        std::tuple{"qwen35", "qwen3_5", "model.language_model."},
        std::tuple{"qwen35moe", "qwen3_5_moe", "model.language_model."}}) {
    const Tensors hf = numbered(hf_tensors(tiny(name)));
    const Json config = vision(type, config_of(name));
    Tensors seeing;
    for (const auto& [tensor, values] : hf)
      seeing[tensor.starts_with("model.") ? prefix + tensor.substr(6) : tensor] = values;
    seeing["model.visual.patch_embed.proj.weight"] = {{2, 3}, std::vector<float>(6)};
    seeing["vision_tower.post_layernorm.bias"] = {{2}, std::vector<float>(2)};
    seeing["multi_modal_projector.mm_soft_emb_norm.weight"] = {{2}, std::vector<float>(2)};
    const auto renaming = rename_tensors(config, shapes_of(seeing), World::hf, World::gguf);
    ASSERT_TRUE(renaming.ok()) << renaming.status().message();
    EXPECT_EQ(renaming->left_out.size(), 3u);
    expect_same(renamed(config_of(name), hf, World::hf, World::gguf),
                carried_out(*renaming, seeing));
    const auto flat = config_for(World::hf, config);
    ASSERT_TRUE(flat.ok());
    EXPECT_EQ((*flat)["model_type"], config_of(name)["model_type"]);
    EXPECT_FALSE(flat->contains("text_config"));
    EXPECT_EQ((*flat)["hidden_size"], 8);
  }
}

TEST(Architecture, WhatTheOtherWorldHasNoPlaceForIsLeftOut) {
  const auto left_out = [](std::string_view model, World from, const std::string& extra,
                           const Shape& shape) {
    Tensors tensors = numbered(hf_tensors(tiny(model)));
    if (from == World::gguf) tensors = renamed(config_of(model), tensors, World::hf, from);
    tensors[extra] = {shape, std::vector<float>(std::size_t(shape.numel()))};
    const auto renaming = rename_tensors(config_of(model), shapes_of(tensors), from,
                                         from == World::gguf ? World::hf : World::gguf);
    return renaming ? renaming->left_out : std::vector{std::string(renaming.status().message())};
  };
  using Names = std::vector<std::string>;
  const std::string rotary = "model.layers.0.self_attn.rotary_emb.inv_freq";
  EXPECT_EQ(left_out("mistral", World::hf, rotary, {2}), Names{rotary});
  EXPECT_EQ(left_out("llama", World::hf, "lm_head.weight", {10, 8}), Names{"lm_head.weight"});
  EXPECT_EQ(left_out("mistral", World::gguf, "rope_freqs.weight", {2}), Names{"rope_freqs.weight"});
  EXPECT_EQ(left_out("qwen35", World::hf, "mtp.fc.weight", {8, 16}), Names{"mtp.fc.weight"});
  EXPECT_EQ(left_out("qwen35", World::gguf, "blk.2.nextn.eh_proj.weight", {8, 16}),
            Names{"blk.2.nextn.eh_proj.weight"});
  EXPECT_EQ(left_out("mistral", World::gguf, "blk.2.attn_q.weight", {8, 16}),
            Names{"tensor \"blk.2.attn_q.weight\" [8,16] is not one of a mistral, expected only "
                  "those"});
  EXPECT_EQ(left_out("mistral", World::hf, "model.layers.0.mlp.extra.weight", {3}),
            Names{"tensor \"model.layers.0.mlp.extra.weight\" [3] is not one of a mistral, "
                  "expected only those"});
}

TEST(Architecture, TensorsOfOneKindAreLeftOutInOneLine) {
  std::vector<std::string> names;
  for (int i = 0; i < 24; ++i)
    names.push_back("model.layers." + std::to_string(i) + ".self_attn.rotary_emb.inv_freq");
  names.push_back("lm_head.weight");
  for (const char* name : {"model.visual.blocks.0.attn.qkv.weight", "model.visual.merger.norm.bias",
                           "mtp.layers.0.norm.weight", "mtp.fc.weight"})
    names.push_back(name);
  EXPECT_EQ(kinds_left_out(names, World::gguf),
            (std::vector<std::string>{
                "left out, as GGUF has no place for it: lm_head.weight",
                "left out 24 tensors that GGUF has no place for: "
                "model.layers.N.self_attn.rotary_emb.inv_freq",
                "left out 2 tensors that GGUF has no place for: model.visual.*",
                "left out 2 tensors that GGUF has no place for: mtp.*",
            }));
  EXPECT_EQ(kinds_left_out({}, World::mlx), std::vector<std::string>{});
  const std::vector<std::string> later{"blk.61.nextn.eh_proj.weight", "blk.61.nextn.enorm.weight"};
  EXPECT_EQ(
      kinds_left_out(later, World::mlx),
      std::vector<std::string>{"left out 2 tensors that MLX has no place for: blk.N.nextn.*"});
}

TEST(Architecture, TheHeadIsACopyWhereAProgramWantsOne) {
  for (const auto& [name, worlds] : {std::pair{"olmo2", std::vector{World::gguf}},
                                     std::pair{"qwen2moe", std::vector{World::gguf, World::mlx}}}) {
    Json config = config_of(name);
    config["tie_word_embeddings"] = true;
    Tensors hf = numbered(hf_tensors(tiny(name)));
    hf.erase("lm_head.weight");
    for (const World world : {World::gguf, World::mlx}) {
      const bool copied = std::find(worlds.begin(), worlds.end(), world) != worlds.end();
      const Tensors there = renamed(config, hf, World::hf, world);
      const auto head = there.find(world == World::gguf ? "output.weight" : "lm_head.weight");
      ASSERT_EQ(head != there.end(), copied) << name;
      if (copied) {
        EXPECT_EQ(head->second.data, hf.at("model.embed_tokens.weight").data);
      }
      const auto notes = rename_tensors(config, shapes_of(hf), World::hf, world)->notes;
      EXPECT_EQ(notes.size(), copied ? 1u : 0u);
    }
    const auto mlx = config_for(World::mlx, config);
    ASSERT_TRUE(mlx.ok());
    EXPECT_EQ((*mlx)["tie_word_embeddings"], worlds.size() == 1);
  }
}

TEST(Architecture, SeparateProjectionsOfAPhi3AreRead) {
  const Tensors hf = numbered(hf_tensors(tiny("phi3")));
  Tensors gguf = renamed(config_of("phi3"), hf, World::hf, World::gguf);
  for (const char* blk : {"blk.0.", "blk.1."}) {
    const Values qkv = gguf.at(std::string(blk) + "attn_qkv.weight");
    gguf.erase(std::string(blk) + "attn_qkv.weight");
    gguf[std::string(blk) + "attn_q.weight"] = {{8, 8}, rows(qkv, {0, 1, 2, 3, 4, 5, 6, 7})};
    gguf[std::string(blk) + "attn_k.weight"] = {{4, 8}, rows(qkv, {8, 9, 10, 11})};
    gguf[std::string(blk) + "attn_v.weight"] = {{4, 8}, rows(qkv, {12, 13, 14, 15})};
  }
  expect_same(hf, renamed(config_of("phi3"), gguf, World::gguf, World::hf));
}

TEST(Architecture, LayersWithoutExperts) {
  Json config = config_of("qwen3moe");
  config["mlp_only_layers"] = {1};
  Tensors hf = numbered(hf_tensors(tiny("qwen3moe")));
  std::erase_if(hf, [](const auto& pair) { return pair.first.starts_with("model.layers.1.mlp."); });
  std::vector<NamedShape> dense;
  add_shapes("gate_proj.weight 7 8\nup_proj.weight 7 8\ndown_proj.weight 8 7\n",
             "model.layers.1.mlp.", dense);
  for (auto& [name, values] : numbered(dense)) hf[name] = values;
  const Tensors mlx = renamed(config, hf, World::hf, World::mlx);
  EXPECT_TRUE(mlx.contains("model.layers.0.mlp.switch_mlp.up_proj.weight"));
  EXPECT_TRUE(mlx.contains("model.layers.1.mlp.up_proj.weight"));
  const auto mlx_config = config_for(World::mlx, config);
  ASSERT_TRUE(mlx_config.ok());
  EXPECT_EQ((*mlx_config)["mlp_only_layers"], Json({1}));
  expect_same(hf, renamed(*mlx_config, mlx, World::mlx, World::hf));
}

TEST(Architecture, WhatIsNotCarriedIsSpokenOf) {
  Json config = config_of("qwen3");
  const auto notes = [&](World to) {
    return rename_tensors(config, hf_tensors(tiny("qwen3")), World::hf, to)->notes;
  };
  config.update({{"use_cache", true}, {"attention_dropout", 0.1}, {"strange", false}});
  EXPECT_TRUE(notes(World::gguf).empty());
  config.update({{"logit_scale", 0.5}, {"strange", true}});
  EXPECT_EQ(notes(World::gguf),
            std::vector<std::string>{"config.json: not carried into GGUF: strange, logit_scale"});
  EXPECT_TRUE(notes(World::mlx).empty());  // where the config goes along
}

TEST(Architecture, ASlidingWindowOfMistralIsSpokenOf) {
  const auto notes = [](World to) {
    return rename_tensors(config_of("mistral"), hf_tensors(tiny("mistral")), World::hf, to)->notes;
  };
  EXPECT_EQ(notes(World::gguf),
            std::vector<std::string>{"sliding_window 4096: llama.cpp's mistral sees all tokens "
                                     "before, not the last of them only"});
  EXPECT_EQ(notes(World::mlx).size(), 1u);
  EXPECT_TRUE(notes(World::hf).empty());
}

TEST(Architecture, TensorsMustBeWhatTheConfigSays) {
  const Tensors hf = numbered(hf_tensors(tiny("qwen3")));
  Tensors less = hf;
  less.erase("model.layers.1.self_attn.k_norm.weight");
  EXPECT_EQ(
      refused(config_of("qwen3"), less, World::hf, World::gguf),
      "no tensor \"model.layers.1.self_attn.k_norm.weight\", expected one as the config says");
  Tensors wrong = hf;
  wrong["model.layers.0.self_attn.q_proj.weight"].shape = {8, 16};
  EXPECT_EQ(refused(config_of("qwen3"), wrong, World::hf, World::mlx),
            "tensor \"model.layers.0.self_attn.q_proj.weight\" is [8,16], expected [16,8] as the "
            "config says");
  Tensors expert = numbered(hf_tensors(tiny("mixtral")));
  expert.erase("model.layers.1.block_sparse_moe.experts.2.w3.weight");
  EXPECT_EQ(refused(config_of("mixtral"), expert, World::hf, World::gguf),
            "no tensor \"model.layers.1.block_sparse_moe.experts.2.w3.weight\", expected one as "
            "the config says");
  Json untied = config_of("qwen3");
  untied["tie_word_embeddings"] = false;
  EXPECT_EQ(refused(untied, hf, World::hf, World::gguf),
            "no tensor \"lm_head.weight\", expected one as the config says");
  EXPECT_EQ(refused(config_of("qwen3"), {}, World::gguf, World::hf),
            "no tensor \"token_embd.weight\", expected one as the config says");
}

// ---- configs ----

std::string refused(std::string_view model, const char* key, const Json& value) {
  Json config = config_of(model);
  config[key] = value;
  return std::string(model_from_config(config).status().message());
}

TEST(Config, WhatIsWrongIsSaid) {
  EXPECT_TRUE(known_architecture(config_of("llama")).ok());
  const std::string all =
      "expected one of llama, mistral, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe, phi3, olmo2, "
      "smollm3, gemma2, gemma3_text, gemma3, qwen3_next, qwen3_5_text, qwen3_5, qwen3_5_moe_text, "
      "qwen3_5_moe";
  EXPECT_EQ(known_architecture(Json{{"model_type", "bert"}}).message(),
            "config.json: model type \"bert\" is not known, " + all);
  EXPECT_EQ(known_architecture(Json::object()).message(), "config.json: no \"model_type\", " + all);
  EXPECT_EQ(known_architecture(Json::array()).message(), "config.json is not an object");
  EXPECT_EQ(known_architecture(Json()).message(),
            "no config.json, expected one that tells the architecture");

  const std::string whole = ", expected a whole number from 1 to 2147483647";
  EXPECT_EQ(refused("llama", "hidden_size", "eight"),
            "config.json: \"hidden_size\" is \"eight\"" + whole);
  EXPECT_EQ(refused("llama", "hidden_size", -8), "config.json: \"hidden_size\" is -8" + whole);
  EXPECT_EQ(refused("llama", "hidden_size", 18446744073709551615u),
            "config.json: \"hidden_size\" is 18446744073709551615" + whole);
  EXPECT_EQ(refused("llama", "hidden_size", 8.5), "config.json: \"hidden_size\" is 8.5" + whole);
  EXPECT_EQ(refused("llama", "hidden_size", nullptr), "config.json: \"hidden_size\" is missing");
  EXPECT_EQ(refused("llama", "num_hidden_layers", 5000),
            "a model with 5000 layers, expected at most 4096");
  EXPECT_EQ(refused("mixtral", "num_local_experts", 70000),
            "a model with 70000 experts, expected at most 4096");
  EXPECT_EQ(refused("llama", "vocab_size", 1 << 30),
            "a model with 1073741824 tokens, expected at most 16777216");
  EXPECT_EQ(refused("llama", "head_dim", 2147483646),
            "a model with 8589934584 rows of queries, expected at most 1048576");
  EXPECT_EQ(refused("llama", "num_key_value_heads", 3),
            "config.json: \"num_attention_heads\" is 4, expected a multiple of "
            "num_key_value_heads (3)");
  EXPECT_EQ(refused("llama", "rms_norm_eps", 0),
            "config.json: \"rms_norm_eps\" is 0, expected a number above 0");
  EXPECT_EQ(refused("llama", "tie_word_embeddings", "yes"),
            "config.json: \"tie_word_embeddings\" is \"yes\", expected true or false");
  EXPECT_EQ(refused("llama", "hidden_act", "gelu"),
            "config.json: \"hidden_act\" \"gelu\" is not what the other worlds compute");
  EXPECT_EQ(refused("llama", "rope_scaling", {{"rope_type", "proportional"}}),
            "config.json: \"rope_scaling.rope_type\" \"proportional\" is not supported, expected "
            "default, linear, dynamic, yarn, llama3 or longrope");
  EXPECT_EQ(refused("qwen3", "rope_scaling", "linear"),
            "config.json: \"rope_scaling\" is \"linear\", expected an object");
  EXPECT_EQ(refused("llama", "rope_scaling",
                    {{"type", "llama3"}, {"low_freq_factor", 4}, {"high_freq_factor", 4}}),
            "config.json: \"rope_scaling.high_freq_factor\" is 4.000000, expected more than "
            "low_freq_factor, 4.000000");
  EXPECT_EQ(refused("phi3", "rope_scaling", {{"type", "linear"}, {"factor", 4}}),
            "config.json: \"rope_scaling.rope_type\" \"linear\" is not one of a phi3, expected "
            "longrope");
  EXPECT_EQ(refused("phi3", "rope_scaling", {{"type", "su"}, {"short_factor", {1.0}}}),
            "config.json: \"rope_scaling.long_factor\" is missing");
  EXPECT_EQ(refused("phi3", "rope_scaling",
                    {{"type", "su"}, {"short_factor", {1.0, 2.0}}, {"long_factor", {1.0}}}),
            "config.json: \"rope_scaling.short_factor\" is [1.0,2.0], expected a list of 1 numbers "
            "above 0");
  EXPECT_EQ(refused("phi3", "head_dim", 4),
            "config.json: \"head_dim\" is not hidden_size / num_attention_heads, which other "
            "worlds take it for in a phi3");
  EXPECT_EQ(refused("smollm3", "no_rope_layers", {1, 2}),
            "config.json: \"no_rope_layers\" is [1,2], expected a 0 or 1 for each of the 2 layers");
  EXPECT_EQ(refused("gemma2", "attention_bias", true),
            "config.json: \"attention_bias\" is true, expected false of a gemma2");
  EXPECT_EQ(refused("qwen2moe", "use_sliding_window", true),
            "config.json: \"use_sliding_window\" is true, which no other world has for this model");
  EXPECT_EQ(refused("qwen2moe", "mlp_only_layers", {2}),
            "config.json: \"mlp_only_layers\" is [2], expected a list of layers below 2");
  for (const double x : {1e300, 1e-60})
    EXPECT_EQ(refused("olmo2", "rms_norm_eps", x),
              "config.json: \"rms_norm_eps\" is " + Json(x).dump() +
                  ", expected a number that f32 holds, as GGUF keeps it");
  for (const char* model : {"qwen2moe", "mixtral"})
    EXPECT_EQ(refused(model, "num_experts_per_tok", 4),
              "config.json: \"num_experts_per_tok\" is 4 of 3 experts, expected no more than there "
              "are");
  EXPECT_EQ(refused("qwen3", "head_dim", 3),
            "config.json: \"partial_rotary_factor\" is one that turns 3 of head_dim 3, expected an "
            "even number up to it");
  EXPECT_EQ(refused("llama", "partial_rotary_factor", 0.5),
            "config.json: \"partial_rotary_factor\" is not 1: a llama turns whole heads");
  EXPECT_EQ(refused("qwen2", "head_dim", 4),
            "config.json: \"head_dim\" is not hidden_size / num_attention_heads, which other "
            "worlds take it for in a qwen2");
  EXPECT_EQ(refused("qwen2", "use_sliding_window", true),
            "config.json: \"use_sliding_window\" is true, which no other world has for this model");
  EXPECT_EQ(refused("qwen3", "attention_bias", true),
            "config.json: \"attention_bias\" is true, expected false of a qwen3");
  EXPECT_EQ(refused("gemma3", "attn_logit_softcapping", 50),
            "config.json: \"attn_logit_softcapping\" is not null");
  EXPECT_EQ(refused("gemma3", "layer_types", {"sliding_attention"}),
            "config.json: \"layer_types\" is no list of num_hidden_layers (2) names, expected one");
  EXPECT_EQ(
      refused("gemma3", "layer_types", {"full_attention", "sliding_attention"}),
      "config.json: \"layer_types\": layer 1 is \"sliding_attention\", expected "
      "\"full_attention\" in the last of every 1 layers and \"sliding_attention\" in the others");
  EXPECT_EQ(refused("qwen35", "linear_num_key_heads", 4),
            "config.json: \"linear_num_value_heads\" is 6, expected a multiple of "
            "linear_num_key_heads (4)");
  EXPECT_EQ(refused("qwen35", "rope_parameters", {{"mrope_section", {1, 1, 1}}}),
            "config.json: \"rope_parameters\" is one whose mrope_section does not add up to the 1 "
            "frequencies, expected it to");
  EXPECT_EQ(refused("qwen35", "rope_parameters", {{"mrope_section", {1, -1, 1}}}),
            "config.json: \"rope_parameters.mrope_section\" is [1,-1,1], expected three whole "
            "numbers");
  Json inside = vision("qwen3_5", config_of("qwen35"));
  inside["text_config"]["hidden_size"] = 0;
  EXPECT_EQ(model_from_config(inside).status().message(),
            "config.json: \"text_config.hidden_size\" is 0" + whole);
}

// Whatever stands in a config, the answer is a value or one line.
TEST(Config, NothingInItDoesHarm) {
  const std::vector<Json> hostile = {
      nullptr,
      true,
      -1,
      0,
      1,
      3,
      4096,
      2147483647,
      9223372036854775807,
      18446744073709551615u,
      0.5,
      -1e300,
      1e300,
      "",
      "full_attention",
      "llama3",
      Json::array(),
      Json::object(),
      Json{1, 2, 3},
      Json{{"rope_type", "llama3"}, {"factor", 1e300}},
      Json{{"rope_type", 7}},
      Json{{"full_attention", {{"rope_type", "yarn"}, {"factor", 0}}}},
      Json{{"mrope_section", "abc"}},
      Json{{"sliding_attention", {{"rope_theta", "x"}}}}};
  std::size_t answers = 0, refusals = 0;
  const auto take = [&](const Status& status) {
    ++(status.ok() ? answers : refusals);
    EXPECT_EQ(status.message().find('\n'), std::string_view::npos);
  };
  const auto ask = [&](const Json& config, const std::vector<NamedShape>& hf,
                       const std::vector<NamedShape>& gguf) {
    for (const World world : {World::hf, World::mlx}) {
      take(config_for(world, config).status());
      take(rename_tensors(config, gguf, World::gguf, world).status());
    }
    take(metadata_from_config(config, hf, "name").status());
    take(rename_tensors(config, hf, World::hf, World::gguf).status());
  };
  for (const Tiny& model : tiny()) {
    const Json config = config_of(model);
    const auto hf = hf_tensors(model);
    const auto gguf = shapes_of(renamed(config, numbered(hf), World::hf, World::gguf));
    for (const auto& [key, value] : config.items()) {
      for (const Json& bad : hostile) {
        Json changed = config;
        changed[key] = bad;
        ask(changed, hf, gguf);
        if (!value.is_object()) continue;
        for (const auto& [inner, unused] : value.items()) {
          changed[key] = value;
          changed[key][inner] = bad;
          ask(changed, hf, gguf);
        }
      }
    }
  }
  EXPECT_GT(answers, 1000u);
  EXPECT_GT(refusals, 1000u);
}

TEST(Config, MlxLmFindsItsKeys) {
  Json config = config_of("qwen2");
  config["quantization_config"] = {{"quant_method", "awq"}};
  const auto qwen2 = config_for(World::mlx, config);
  ASSERT_TRUE(qwen2.ok());
  EXPECT_EQ((*qwen2)["rope_theta"], 1e6);
  EXPECT_EQ((*qwen2)["rope_scaling"]["rope_type"], "yarn");
  EXPECT_EQ((*qwen2)["rope_scaling"]["original_max_position_embeddings"], 128);
  EXPECT_FALSE(qwen2->contains("quantization_config"));

  const auto gemma = config_for(World::mlx, vision("gemma3", config_of("gemma3")));
  ASSERT_TRUE(gemma.ok());
  EXPECT_EQ((*gemma)["model_type"], "gemma3_text");
  EXPECT_EQ((*gemma)["rope_theta"], 1e6);
  EXPECT_EQ((*gemma)["rope_local_base_freq"], 20000.0);
  EXPECT_EQ((*gemma)["sliding_window_pattern"], 2);
  EXPECT_EQ((*gemma)["rope_scaling"]["factor"], 8.0);

  const auto next = config_for(World::mlx, config_of("qwen3next"));
  ASSERT_TRUE(next.ok());
  EXPECT_EQ((*next)["partial_rotary_factor"], 0.5);
  EXPECT_EQ((*next)["full_attention_interval"], 2);
  EXPECT_EQ((*next)["rope_theta"], 10000.0);

  const auto qwen35 = config_for(World::mlx, config_of("qwen35"));
  ASSERT_TRUE(qwen35.ok());
  EXPECT_EQ((*qwen35)["model_type"], "qwen3_5");
  EXPECT_EQ((*qwen35)["text_config"]["full_attention_interval"], 2);
  EXPECT_EQ((*qwen35)["text_config"]["rope_parameters"]["rope_theta"], 1e7);

  Json capped = config_of("gemma3");
  capped["final_logit_softcapping"] = 30.0;
  EXPECT_EQ(config_for(World::mlx, capped).status().message(),
            "config.json: \"final_logit_softcapping\": mlx-lm's gemma3_text does not have it");
  Json wide = config_of("mixtral");
  wide["head_dim"] = 4;
  EXPECT_EQ(config_for(World::mlx, wide).status().message(),
            "config.json: \"head_dim\": mlx-lm's mixtral takes it for hidden_size / "
            "num_attention_heads");
}

TEST(Config, ExpertsAreCountedUnderEitherName) {
  Json config = config_of("qwen3moe");
  config["num_local_experts"] = config["num_experts"];
  config.erase("num_experts");
  const auto mlx = config_for(World::mlx, config);
  ASSERT_TRUE(mlx.ok()) << mlx.status().message();
  EXPECT_EQ((*mlx)["num_experts"], 3);
}

TEST(Config, GemmasOfTheHubLeaveTheirDefaultsOut) {
  const auto model = model_from_config(Json::parse(R"({"model_type": "gemma3", "text_config": {
    "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
    "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024}})"));
  ASSERT_TRUE(model.ok()) << model.status().message();
  EXPECT_EQ(model->heads, 8);
  EXPECT_EQ(model->kv_heads, 4);
  EXPECT_EQ(model->head_dim, 256);
  EXPECT_EQ(model->vocab, 262208);
  EXPECT_EQ(model->period, 6);
  EXPECT_EQ(model->window, 1024);
  EXPECT_EQ(model->rope.theta, 1e6);
  EXPECT_EQ(model->rope.local_theta, 1e4);
  EXPECT_TRUE(model->tied && model->in_vision);
}

// ---- metadata ----

class Metadata : public TestFolder {
 protected:
  // A file with these keys and the tensors in F32.
  Result<GgufFile> file(const GgufMetadata& keys, const Tensors& tensors) const {
    GgufContents contents(path("m.gguf"));
    for (const auto& [key, value] : keys) BITTERN_TRY(contents.add(key, value));
    std::vector<std::string> data;
    for (const auto& [name, values] : tensors) {
      BITTERN_TRY(contents.add_tensor(name, GgmlType::f32, values.shape));
      data.push_back(bytes_of(values.data));
    }
    put("m.gguf", file_text(contents.lay_out(), data));
    return GgufFile::open(path("m.gguf"));
  }

  static GgufMetadata metadata(const Json& config, const Tensors& tensors) {
    auto keys = metadata_from_config(config, shapes_of(tensors), "Tiny");
    EXPECT_TRUE(keys.ok()) << keys.status().message();
    return keys ? std::move(*keys) : GgufMetadata{};
  }
};

std::string text(const GgufMetadata& keys) {
  std::string all;
  for (const auto& [key, value] : keys) {
    all += key + " " + name(value.type()) + " ";
    const auto bytes = value.encoded();
    std::uint32_t word = 0;
    if (bytes.size() == 4) std::memcpy(&word, bytes.data(), 4);
    if (value.type() == GgufType::u32) {
      all += std::to_string(word);
    } else if (value.type() == GgufType::f32) {
      std::ostringstream number;
      number << std::bit_cast<float>(word);
      all += number.str();
    } else {
      for (const std::byte b : bytes)
        if (b >= std::byte{' '}) all += static_cast<char>(b);
    }
    all += "\n";
  }
  return all;
}

TEST_F(Metadata, GoesThereAndBack) {
  for (const Tiny& model : tiny()) {
    SCOPED_TRACE(model.name);
    const Json config = config_of(model);
    const Tensors hf = numbered(hf_tensors(model));
    const Tensors gguf = renamed(config, hf, World::hf, World::gguf);
    const GgufMetadata keys = metadata(config, hf);
    const auto written = file(keys, gguf);
    ASSERT_TRUE(written.ok()) << written.status().message();
    const auto back = config_from_gguf(*written, "float32");
    ASSERT_TRUE(back.ok()) << back.status().message();
    EXPECT_EQ((*back)["dtype"], "float32");
    EXPECT_EQ((*back)["model_type"], config["model_type"]);
    EXPECT_EQ(text(metadata(*back, hf)), text(keys));
    expect_same(hf, renamed(*back, gguf, World::gguf, World::hf));
    // Every number that the first config gives is there again.
    for (const auto& [key, value] : config.items()) {
      if (!value.is_number() && !value.is_boolean()) continue;
      EXPECT_EQ((*back)[key], value) << key;
    }
  }
}

TEST_F(Metadata, IsWhatLlamaCppReads) {
  EXPECT_EQ(text(metadata(config_of("qwen35moe"), numbered(hf_tensors(tiny("qwen35moe"))))),
            "general.architecture string qwen35moe\n"
            "general.type string model\n"
            "general.name string Tiny\n"
            "general.size_label string 3x2.4K\n"
            "qwen35moe.block_count u32 2\n"
            "qwen35moe.context_length u32 32768\n"
            "qwen35moe.embedding_length u32 8\n"
            "qwen35moe.attention.head_count u32 4\n"
            "qwen35moe.attention.head_count_kv u32 2\n"
            "qwen35moe.attention.key_length u32 8\n"
            "qwen35moe.attention.value_length u32 8\n"
            "qwen35moe.attention.layer_norm_rms_epsilon f32 1e-06\n"
            "qwen35moe.vocab_size u32 10\n"
            "qwen35moe.rope.freq_base f32 1e+07\n"
            "qwen35moe.rope.dimension_count u32 6\n"
            "qwen35moe.expert_count u32 3\n"
            "qwen35moe.expert_used_count u32 2\n"
            "qwen35moe.expert_feed_forward_length u32 6\n"
            "qwen35moe.expert_shared_feed_forward_length u32 5\n"
            "qwen35moe.ssm.conv_kernel u32 4\n"
            "qwen35moe.ssm.state_size u32 2\n"
            "qwen35moe.ssm.group_count u32 2\n"
            "qwen35moe.ssm.time_step_rank u32 6\n"
            "qwen35moe.ssm.inner_size u32 12\n"
            "qwen35moe.full_attention_interval u32 2\n"
            "qwen35moe.rope.dimension_sections array \n");
  const auto sections = [&](std::string_view model) {
    const Tensors hf = numbered(hf_tensors(tiny(model)));
    const auto written = file(metadata(config_of(model), hf), {});
    return *written->integers(std::string(model) + ".rope.dimension_sections");
  };
  EXPECT_EQ(sections("qwen35moe"), (std::vector<std::int64_t>{1, 1, 1, 0}));
  EXPECT_EQ(sections("qwen35"), (std::vector<std::int64_t>{1, 0, 0, 0}));  // of one frequency
}

// A window as long as the context hides nothing.
TEST(Architecture, NotesWindowsThatMatter) {
  const auto noted = [](std::int64_t window, World to) {
    Json config = config_of("phi3");  // of 128 tokens
    config["sliding_window"] = window;
    const Tensors hf = numbered(hf_tensors(tiny("phi3")));
    const auto renamed = rename_tensors(config, shapes_of(hf), World::hf, to);
    EXPECT_TRUE(renamed.ok()) << renamed.status().message();
    return renamed && !renamed->notes.empty() && renamed->notes[0].starts_with("sliding_window ");
  };
  for (const World to : {World::gguf, World::mlx}) {
    EXPECT_TRUE(noted(127, to));
    EXPECT_FALSE(noted(128, to));
  }
}

// llama.cpp stops at a window that no layer has.
TEST_F(Metadata, HasNoWindowWhereAllLayersSeeEverything) {
  Json config = config_of("gemma3");
  const auto window = [&] {
    return text(metadata(config, numbered(hf_tensors(tiny("gemma3")))))
        .find("gemma3.attention.sliding_window u32 ");
  };
  EXPECT_NE(window(), std::string::npos);
  config["layer_types"] = {"full_attention", "full_attention"};
  EXPECT_EQ(window(), std::string::npos);
}

// What one program cannot compute is no reason to refuse the other's format.
TEST_F(Metadata, SaysWhatAProgramCannot) {
  struct Row {
    const char* model;
    Json changes;
    const char* gguf;  // what is refused; empty: nothing
    const char* mlx;
  };
  const Json yarn = {{"type", "yarn"}, {"factor", 4.0}};
  const auto scaled = [&](const char* key, const Json& value) {
    Json rope = yarn;
    rope[key] = value;
    return Json{{"rope_scaling", rope}};
  };
  const Json llama3 = {{"rope_scaling", {{"rope_type", "llama3"}, {"factor", 8.0}}}};
  const Row rows[] = {
      {"gemma3",
       {{"query_pre_attn_scalar", 8}},
       "\"query_pre_attn_scalar\": llama.cpp's gemma3_text of this size takes it for 4",
       ""},
      {"gemma3",
       {{"layer_types", {"sliding_attention", "sliding_attention"}}},
       "",
       "\"layer_types\": mlx-lm's gemma3_text needs a layer with full attention"},
      {"gemma3", {{"layer_types", {"full_attention", "full_attention"}}}, "", ""},
      {"gemma2",
       {{"query_pre_attn_scalar", 8}},
       "\"query_pre_attn_scalar\": llama.cpp's gemma2 of this size takes it for 4",
       ""},
      {"gemma2",
       {{"final_logit_softcapping", nullptr}},
       "\"final_logit_softcapping\": llama.cpp's gemma2 always has it",
       "\"final_logit_softcapping\": mlx-lm's gemma2 always has it"},
      {"gemma2",
       {{"layer_types", {"full_attention", "full_attention"}}},
       "\"layer_types\": llama.cpp's gemma2 always has layers with a sliding window",
       ""},
      {"gemma2",
       {{"rope_scaling", {{"type", "linear"}, {"factor", 2.0}}}},
       "",
       "\"rope_scaling\": mlx-lm's gemma2 does not have type \"linear\", it does not scale its "
       "rotary embedding"},
      {"qwen35",
       {{"linear_value_head_dim", 4}},
       "\"linear_key_head_dim\": llama.cpp's qwen3_5_text has one number for it and "
       "\"linear_value_head_dim\"",
       ""},
      {"qwen3", llama3,
       "\"rope_scaling\": llama.cpp's qwen3 does not have type \"llama3\", only linear, yarn", ""},
      {"olmo2", llama3,
       "\"rope_scaling\": llama.cpp's olmo2 does not have type \"llama3\", only linear, yarn", ""},
      {"smollm3", llama3,
       "\"rope_scaling\": llama.cpp's smollm3 does not have type \"llama3\", only linear, yarn",
       ""},
      {"llama",
       {{"rope_scaling", {{"type", "dynamic"}, {"factor", 2.0}}}},
       "\"rope_scaling\": llama.cpp's llama does not have type \"dynamic\", only linear, yarn, "
       "llama3",
       ""},
      {"qwen3", scaled("attention_factor", 1.0),
       "\"attention_factor\": llama.cpp's qwen3 takes it for 0.1 ln(factor) + 1",
       "\"attention_factor\": mlx-lm's qwen3 takes it for 0.1 ln(factor) + 1"},
      {"qwen3", scaled("beta_fast", 16.0), "\"beta_fast\": llama.cpp's qwen3 takes it for 32", ""},
      {"qwen3", scaled("beta_slow", 2.0), "\"beta_slow\": llama.cpp's qwen3 takes it for 1", ""},
      {"qwen3moe",
       {{"norm_topk_prob", false}},
       "\"norm_topk_prob\": llama.cpp's qwen3_moe takes it for true",
       ""},
      {"qwen3next",
       {{"norm_topk_prob", false}},
       "\"norm_topk_prob\": llama.cpp's qwen3_next takes it for true",
       ""},
      {"qwen3next",
       {{"mlp_only_layers", {1}}},
       "\"mlp_only_layers\": llama.cpp's qwen3_next has experts in every layer",
       ""},
      {"qwen3moe",
       {{"decoder_sparse_step", 2}},
       "\"decoder_sparse_step\": llama.cpp's qwen3_moe has experts in every layer",
       ""},
      {"qwen2moe",
       {{"norm_topk_prob", true}},
       "\"norm_topk_prob\": llama.cpp's qwen2_moe takes it for false",
       "\"norm_topk_prob\": mlx-lm's qwen2_moe takes it for false"},
      {"qwen2moe", {{"qkv_bias", false}}, "", "\"qkv_bias\": mlx-lm's qwen2_moe takes it for true"},
      {"olmo2",
       {{"attention_bias", true}},
       "\"attention_bias\": llama.cpp's olmo2 has no biases",
       ""},
      {"olmo2",
       {{"head_dim", 4}},
       "\"head_dim\": llama.cpp's olmo2 takes it for hidden_size / num_attention_heads",
       ""},
      {"smollm3", {{"mlp_bias", true}}, "\"mlp_bias\": llama.cpp's smollm3 has no biases", ""},
      {"smollm3",
       {{"no_rope_layers", {1, 0}}},
       "\"no_rope_layers\": llama.cpp's smollm3 leaves out every fourth layer, expected that",
       ""},
      {"smollm3",
       {{"use_sliding_window", true}, {"sliding_window", 8}},
       "\"use_sliding_window\": llama.cpp's smollm3 sees all tokens before",
       ""},
      {"phi3",
       {{"rope_scaling",
         {{"type", "longrope"},
          {"attention_factor", 2.0},
          {"short_factor", {1.0}},
          {"long_factor", {1.0}}}}},
       "",
       "\"attention_factor\": mlx-lm's phi3 takes it for sqrt(1 + ln(s) / "
       "ln(original_max_position_embeddings)), s = max_position_embeddings / "
       "original_max_position_embeddings"},
  };
  const auto said = [](const char* what) {
    return *what == 0 ? std::string() : std::string("config.json: ") + what;
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(std::string(row.model) + " " + row.changes.dump());
    Json config = config_of(row.model);
    config.update(row.changes);
    const auto shapes = hf_tensors(tiny(row.model));
    EXPECT_EQ(metadata_from_config(config, shapes, "").status().message(), said(row.gguf));
    EXPECT_EQ(config_for(World::mlx, config).status().message(), said(row.mlx));
    EXPECT_EQ(config_for(World::hf, config).status().message(), "");
  }
}

TEST_F(Metadata, SizesAreRoundedAsLlamaCppsConverterDoes) {
  const auto label = [](std::initializer_list<NamedShape> shapes, std::string_view model) {
    const auto keys = metadata_from_config(config_of(model), std::span(shapes), "");
    return std::string(reinterpret_cast<const char*>((*keys)[2].second.encoded().data()) + 8,
                       (*keys)[2].second.encoded().size() - 8);
  };
  EXPECT_EQ(label({{"a", {134515008}}}, "llama"), "135M");
  EXPECT_EQ(label({{"a", {1235814400}}}, "llama"), "1.2B");
  EXPECT_EQ(label({{"a", {8030261248}}}, "llama"), "8.0B");
  EXPECT_EQ(label({{"a", {13015864320}}}, "llama"), "13B");
  EXPECT_EQ(label({{"a", {999}}}, "llama"), "1.0K");
  EXPECT_EQ(label({{"a", {400}}}, "llama"), "0.40K");
  EXPECT_EQ(
      label({{"a", {1200000000}}, {"model.layers.0.mlp.experts.0.up", {3000000000}}}, "mixtral"),
      "3x2.2B");
  EXPECT_EQ(label({{"a", {5000000}}, {"model.visual.b", {90000000}}}, "qwen35"), "5.0M");
}

GgufMetadata with(GgufMetadata keys, const std::string& key, const GgufData& value) {
  std::erase_if(keys, [&](const auto& pair) { return pair.first == key; });
  keys.emplace_back(key, value);
  return keys;
}

TEST_F(Metadata, WhatIsWrongIsSaid) {
  const auto refused = [&](std::string_view model, const std::string& key, const GgufData& value) {
    const Tensors hf = numbered(hf_tensors(tiny(model)));
    const Tensors gguf = renamed(config_of(model), hf, World::hf, World::gguf);
    const auto written = file(with(metadata(config_of(model), hf), key, value), gguf);
    EXPECT_TRUE(written.ok()) << written.status().message();
    const std::string message(config_from_gguf(*written, "float32").status().message());
    const std::string path = written->path() + ": ";
    return message.starts_with(path) ? message.substr(path.size()) : message;
  };
  EXPECT_EQ(refused("llama", "general.architecture", GgufData("bert")),
            "architecture \"bert\" is not known, expected one of llama, qwen2, qwen2moe, qwen3, "
            "qwen3moe, phi3, olmo2, smollm3, gemma2, gemma3, qwen3next, qwen35, qwen35moe");
  EXPECT_EQ(refused("llama", "llama.block_count", GgufData(std::uint32_t{5000})),
            "a model with 5000 layers, expected at most 4096");
  EXPECT_EQ(refused("qwen35", "qwen35.nextn_predict_layers", GgufData(std::uint32_t{2})),
            "qwen35.block_count: expected more than nextn_predict_layers");
  EXPECT_EQ(refused("llama", "llama.embedding_length", GgufData(std::int32_t{-1})),
            "llama.embedding_length: -1, expected 1 or more, below 2^31");
  const std::vector<std::uint32_t> uneven{2, 1}, even{2, 0};
  EXPECT_EQ(refused("llama", "llama.attention.head_count_kv",
                    GgufData::array(std::span<const std::uint32_t>(uneven))),
            "llama.attention.head_count_kv: differs between layers, expected one number");
  EXPECT_EQ(refused("llama", "llama.attention.head_count_kv",
                    GgufData::array(std::span<const std::uint32_t>(even))),
            "");
  EXPECT_EQ(refused("llama", "llama.attention.head_count_kv", GgufData(std::uint32_t{3})),
            "llama.attention.head_count: no multiple of attention.head_count_kv, expected one");
  EXPECT_EQ(refused("llama", "llama.attention.value_length", GgufData(std::uint32_t{3})),
            "llama.attention.value_length: 3, expected attention.key_length, 4");
  EXPECT_EQ(refused("llama", "llama.rope.freq_base", GgufData(0.0f)),
            "llama.rope.freq_base: 0.000000, expected a number above 0");
  EXPECT_EQ(refused("qwen3", "qwen3.rope.dimension_count", GgufData(std::uint32_t{2})),
            "qwen3.rope.dimension_count: 2 of a head's 4, expected all of them, or an even number "
            "in a phi3, qwen3next or qwen35");
  EXPECT_EQ(refused("llama", "llama.rope.scaling.type", GgufData("longrope")),
            "llama.rope.scaling.type: \"longrope\", expected none, linear or yarn");
  EXPECT_EQ(refused("qwen35", "qwen35.ssm.inner_size", GgufData(std::uint32_t{13})),
            "qwen35.ssm.inner_size: the heads of the gated delta net do not fit together, expected "
            "ssm.state_size x ssm.time_step_rank, which is a multiple of ssm.group_count");
  const std::array<bool, 2> recurrent{false, true}, usual{true, false};
  EXPECT_EQ(
      refused("qwen35", "qwen35.attention.recurrent_layers",
              GgufData::array(std::span<const bool>(recurrent))),
      "qwen35.attention.recurrent_layers: not all but every full_attention_interval-th layer, "
      "expected that");
  EXPECT_EQ(refused("qwen35", "qwen35.attention.recurrent_layers",
                    GgufData::array(std::span<const bool>(usual))),
            "");
  EXPECT_EQ(refused("qwen35", "qwen35.rope.dimension_sections",
                    GgufData::array(std::span<const std::uint32_t>(even))),
            "qwen35.rope.dimension_sections: expected three and a 0");
}

TEST_F(Metadata, NothingInItDoesHarm) {
  const std::vector<std::int64_t> list{1, -1, 1, 0};
  const std::vector<GgufData> hostile = {GgufData(true),
                                         GgufData("text"),
                                         GgufData(std::int32_t{-1}),
                                         GgufData(std::uint32_t{0}),
                                         GgufData(std::uint32_t{3}),
                                         GgufData(std::uint32_t{0xffffffff}),
                                         GgufData(std::uint64_t{0xffffffffffffffff}),
                                         GgufData(-1e30f),
                                         GgufData(std::numeric_limits<float>::quiet_NaN()),
                                         GgufData::array(std::span<const std::int64_t>(list))};
  for (const std::string_view name : {"llama", "qwen35moe"}) {
    const Tensors hf = numbered(hf_tensors(tiny(name)));
    const auto shapes = shapes_of(renamed(config_of(name), hf, World::hf, World::gguf));
    Tensors few;  // the file has what config_from_gguf looks at
    few["token_embd.weight"] = {{10, 8}, std::vector<float>(80)};
    few["rope_freqs.weight"] = {{2}, {1, 8}};
    const GgufMetadata keys = metadata(config_of(name), hf);
    for (const auto& [key, value] : keys) {
      if (name == "llama" && key.find(".rope.") == key.npos) continue;  // the rest is the same
      for (const GgufData& bad : hostile) {
        const auto written = file(with(keys, key, bad), few);
        ASSERT_TRUE(written.ok());
        const auto config = config_from_gguf(*written, "float32");
        EXPECT_EQ(config.status().message().find('\n'), std::string_view::npos);
        if (config) (void)rename_tensors(*config, shapes, World::gguf, World::hf).ok();
      }
    }
  }
}

TEST_F(Metadata, LayersThatPredictFurtherAreNotCounted) {
  const Tensors hf = numbered(hf_tensors(tiny("qwen35")));
  const Tensors gguf = renamed(config_of("qwen35"), hf, World::hf, World::gguf);
  GgufMetadata keys =
      with(metadata(config_of("qwen35"), hf), "qwen35.block_count", GgufData(std::uint32_t{3}));
  keys = with(keys, "qwen35.nextn_predict_layers", GgufData(std::uint32_t{1}));
  const auto written = file(keys, gguf);
  ASSERT_TRUE(written.ok());
  EXPECT_EQ((*config_from_gguf(*written, "float32"))["num_hidden_layers"], 2);
}

TEST_F(Metadata, Llama3IsFoundInItsFactors) {
  const auto back = [&](const Rope& rope, std::int64_t dim) {
    Json config = config_of("mistral");
    config["model_type"] = "llama";
    config["head_dim"] = dim;
    config["rope_theta"] = rope.theta;
    Tensors gguf;
    gguf["token_embd.weight"] = {{10, 8}, std::vector<float>(80)};
    gguf["rope_freqs.weight"] = {{dim / 2}, llama3_factors(rope, dim)};
    const auto written = file(metadata(config, {}), gguf);
    EXPECT_TRUE(written.ok()) << written.status().message();
    const auto found = config_from_gguf(*written, "float32");
    return found ? (*found)["rope_scaling"].dump() : std::string(found.status().message());
  };
  Rope rope;
  rope.type = "llama3";
  rope.theta = 500000;
  rope.factor = 32;
  rope.context = 8192;
  EXPECT_EQ(back(rope, 64),
            R"({"rope_type":"llama3","factor":32.0,"low_freq_factor":1.0,"high_freq_factor":4.0,)"
            R"("original_max_position_embeddings":8192})");
  rope.factor = 8;
  EXPECT_EQ(back(rope, 128),
            R"({"rope_type":"llama3","factor":8.0,"low_freq_factor":1.0,"high_freq_factor":4.0,)"
            R"("original_max_position_embeddings":8192})");
  rope.theta = 20000;
  rope.high = 6.5;
  rope.context = 128;
  EXPECT_EQ(back(rope, 32),
            R"({"rope_type":"llama3","factor":8.0,"low_freq_factor":1.0,"high_freq_factor":6.5,)"
            R"("original_max_position_embeddings":128})");
}

// Heads of any size, original contexts of any length: what comes back gives the same factors, bit
// for bit, and is the same where the file says the length, as ours do.
TEST_F(Metadata, Llama3GoesThereAndBack) {
  int exact = 0, all = 0;
  for (const std::int64_t dim : {8, 16, 32, 64, 80, 96, 128, 256})
    for (const double theta : {1e4, 2e4, 5e5, 1e6})
      for (const double factor : {2.0, 8.0, 32.0})
        for (const std::int64_t context : {32, 64, 100, 256, 1024, 8192}) {
          Rope rope;
          rope.type = "llama3";
          rope.theta = theta;
          rope.factor = factor;
          rope.context = context;
          const auto factors = llama3_factors(rope, dim);
          const bool shows = factors.back() != 1;
          for (const std::int64_t known : {context, std::int64_t{0}}) {
            Rope back;
            back.theta = theta;
            ASSERT_TRUE(solve_llama3(factors, known, 1 << 17, back))
                << dim << " " << theta << " " << factor << " " << context << " " << known;
            EXPECT_EQ(llama3_factors(back, dim), factors);
            if (known == 0 || !shows) continue;
            ++all;
            EXPECT_EQ(back.context, context);
            EXPECT_EQ(back.low, 1);
            EXPECT_EQ(back.high, 4);
            exact += back.factor == factor;
          }
        }
  EXPECT_EQ(exact, all);
}

TEST_F(Metadata, Llama3WithUnusualBounds) {
  for (const std::int64_t dim : {32, 64, 128}) {
    Rope rope;
    rope.type = "llama3";
    rope.theta = 500000;
    rope.factor = 16;
    rope.context = 8192;
    rope.low = 2;
    rope.high = 16;
    const auto factors = llama3_factors(rope, dim);
    for (const std::int64_t known : {8192, 0}) {
      Rope back;
      back.theta = rope.theta;
      ASSERT_TRUE(solve_llama3(factors, known, 1 << 17, back)) << dim;
      EXPECT_EQ(llama3_factors(back, dim), factors);
      EXPECT_EQ(double(back.context) / back.low, 4096);
      EXPECT_EQ(back.high / back.low, 8);
    }
  }
}

TEST_F(Metadata, OtherFactorsAreRefused) {
  const auto refused = [&](std::vector<float> factors) {
    Tensors gguf;
    gguf["token_embd.weight"] = {{10, 8}, std::vector<float>(80)};
    gguf["rope_freqs.weight"] = {{std::int64_t(factors.size())}, factors};
    const auto written = file(metadata(config_of("mistral"), {}), gguf);
    const std::string message(config_from_gguf(*written, "float32").status().message());
    return message.substr(message.find("tensor"));
  };
  EXPECT_EQ(refused({1, 2, 3}), "tensor rope_freqs.weight: F32 [3], expected F32 [2]");
  EXPECT_EQ(refused({4, 1}),
            "tensor rope_freqs.weight: not the factors of a llama3 rotary embedding, expected them "
            "to be");
  EXPECT_EQ(refused({1, std::nanf("")}),
            "tensor rope_freqs.weight: a factor is nan, expected 1 or more");
}

TEST(Architecture, Llama3IsWrittenAsFactors) {
  Json config = config_of("mistral");
  config["model_type"] = "llama";
  config["rope_scaling"] = {{"rope_type", "llama3"},
                            {"factor", 8.0},
                            {"low_freq_factor", 1.0},
                            {"high_freq_factor", 4.0},
                            {"original_max_position_embeddings", 256}};
  const Tensors hf = numbered(hf_tensors(tiny("mistral")));
  const Tensors gguf = renamed(config, hf, World::hf, World::gguf);
  // Wavelengths of 2 pi, below 256 / 4, and of 200 pi, above 256.
  EXPECT_EQ(gguf.at("rope_freqs.weight").data, (std::vector<float>{1, 8}));
  expect_same(hf, renamed(config, gguf, World::gguf, World::hf));
}

}  // namespace
}  // namespace bittern
