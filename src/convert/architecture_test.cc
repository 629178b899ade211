#include "convert/architecture.h"

#include <gtest/gtest.h>

#include <numeric>

#include "convert/model_config.h"
#include "convert/tiny_models_test.h"

namespace bittern {
namespace {

using namespace tiny_models;

std::string refused(const Json& config, const Tensors& tensors, World from, World to) {
  return std::string(rename_tensors(config, shapes_of(tensors), from, to).status().message());
}

std::vector<float> rows(const Values& values, std::initializer_list<std::int64_t> which) {
  const std::int64_t width = values.shape[values.shape.rank - 1];
  std::vector<float> out;
  for (const std::int64_t row : which)
    out.insert(out.end(), values.data.begin() + row * width,
               values.data.begin() + (row + 1) * width);
  return out;
}

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
            Names{"tensor \"blk.2.attn_q.weight\" [8,16] does not belong to a mistral model"});
  EXPECT_EQ(left_out("mistral", World::hf, "model.layers.0.mlp.extra.weight", {3}),
            Names{"tensor \"model.layers.0.mlp.extra.weight\" [3] does not belong to a mistral "
                  "model"});
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
  EXPECT_EQ(refused(config_of("qwen3"), less, World::hf, World::gguf),
            "no tensor \"model.layers.1.self_attn.k_norm.weight\"; the config requires it");
  Tensors wrong = hf;
  wrong["model.layers.0.self_attn.q_proj.weight"].shape = {8, 16};
  EXPECT_EQ(refused(config_of("qwen3"), wrong, World::hf, World::mlx),
            "tensor \"model.layers.0.self_attn.q_proj.weight\" is [8,16], expected [16,8] as the "
            "config says");
  Tensors expert = numbered(hf_tensors(tiny("mixtral")));
  expert.erase("model.layers.1.block_sparse_moe.experts.2.w3.weight");
  EXPECT_EQ(refused(config_of("mixtral"), expert, World::hf, World::gguf),
            "no tensor \"model.layers.1.block_sparse_moe.experts.2.w3.weight\"; "
            "the config requires it");
  Json untied = config_of("qwen3");
  untied["tie_word_embeddings"] = false;
  EXPECT_EQ(refused(untied, hf, World::hf, World::gguf),
            "no tensor \"lm_head.weight\"; the config requires it");
  EXPECT_EQ(refused(config_of("qwen3"), {}, World::gguf, World::hf),
            "no tensor \"token_embd.weight\"; the config requires it");
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
