// A model from config.json, and the config.json of another world.
#include <gtest/gtest.h>

#include <limits>

#include "convert/model_config.h"
#include "convert/tiny_models_test.h"

namespace bittern {
namespace {

using namespace tiny_models;

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
  EXPECT_EQ(
      refused("phi3", "rope_scaling", {{"type", "linear"}, {"factor", 4}}),
      "config.json: \"rope_scaling.rope_type\" \"linear\" does not belong to a phi3, expected "
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
            "frequencies");
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

}  // namespace
}  // namespace bittern
