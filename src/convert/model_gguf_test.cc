// A model from GGUF's metadata, and the metadata from a config.json.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <sstream>

#include "convert/model_config.h"
#include "convert/tiny_models_test.h"
#include "formats/test_folder.h"

namespace bittern {
namespace {

using namespace tiny_models;

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
            "llama.attention.head_count: not a multiple of attention.head_count_kv");
  EXPECT_EQ(refused("qwen35moe", "qwen35moe.expert_used_count", GgufData(std::uint32_t{4})),
            "qwen35moe.expert_used_count: 4 of 3 experts, expected no more than there are");
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
  EXPECT_EQ(refused("qwen35", "qwen35.attention.recurrent_layers",
                    GgufData::array(std::span<const bool>(recurrent))),
            "qwen35.attention.recurrent_layers: expected all layers but every "
            "full_attention_interval-th");
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
  const auto back = [&](const RopeConfig& rope, std::int64_t dim) {
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
  RopeConfig rope;
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
          RopeConfig rope;
          rope.type = "llama3";
          rope.theta = theta;
          rope.factor = factor;
          rope.context = context;
          const auto factors = llama3_factors(rope, dim);
          const bool shows = factors.back() != 1;
          for (const std::int64_t known : {context, std::int64_t{0}}) {
            RopeConfig back;
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
    RopeConfig rope;
    rope.type = "llama3";
    rope.theta = 500000;
    rope.factor = 16;
    rope.context = 8192;
    rope.low = 2;
    rope.high = 16;
    const auto factors = llama3_factors(rope, dim);
    for (const std::int64_t known : {8192, 0}) {
      RopeConfig back;
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
            "tensor rope_freqs.weight: no llama3 rotary embedding has these factors");
  EXPECT_EQ(refused({1, std::nanf("")}),
            "tensor rope_freqs.weight: a factor is nan, expected 1 or more");
}

}  // namespace
}  // namespace bittern
