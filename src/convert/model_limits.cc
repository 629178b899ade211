// What of a model llama.cpp and mlx-lm do not have, or do otherwise than transformers.
#include <algorithm>
#include <cmath>
#include <initializer_list>

#include "convert/model_config.h"
#include "formats/json_events.h"

namespace bittern {
namespace {

// Refusals are about the config, whichever file it was read from.
class Limits {
 public:
  Limits(const ModelConfig& model, const char* program)
      : of_(std::string(program) + "'s " + model.type->name + " ") {}

  void must(bool holds, const char* key, const std::string& what) {
    if (!holds && status_.ok())
      status_ = unsupported("config.json: \"" + std::string(key) + "\": " + of_ + what);
  }
  const Status& status() const { return status_; }

 private:
  std::string of_;
  Status status_;
};

bool one_of(Arch arch, std::initializer_list<Arch> list) {
  return std::find(list.begin(), list.end(), arch) != list.end();
}

// Names of a scaled rotary embedding's types that a program has.
void must_scale(Limits& limits, const RopeConfig& rope, std::initializer_list<const char*> types) {
  std::string all;
  bool known = rope.type == "default";
  for (const char* type : types) {
    known = known || rope.type == type;
    all.append(all.empty() ? "" : ", ").append(type);
  }
  limits.must(known, "rope_scaling",
              "does not have type " + in_quotes(rope.type) +
                  (all.empty() ? ", it does not scale its rotary embedding" : ", only " + all));
}

}  // namespace

std::int64_t llama_cpp_query_scale(const ModelConfig& m) {
  // GGUF has no key for the scale. llama.cpp tells a model's size by its number of layers, in a
  // table for each architecture: 46 layers of gemma2, and 62 of gemma3, are the 27B models, whose
  // queries were trained with 1 / sqrt(n_embd / n_head); every other size has 1 / sqrt(head_dim).
  const int largest = m.arch() == Arch::gemma2 ? 46 : 62;
  return m.layers == largest ? m.hidden / m.heads : m.head_dim;
}

double usual_longrope_attention(std::int64_t context, std::int64_t original) {
  if (context <= original) return 1;
  return std::sqrt(1 + std::log(double(context) / double(original)) / std::log(double(original)));
}

bool has_tied(Arch arch, World world) {
  if (world == World::gguf) return !one_of(arch, {Arch::olmo2, Arch::qwen2moe});
  return world == World::hf || arch != Arch::qwen2moe;
}

Status check_llama_cpp(const ModelConfig& m) {
  Limits limits(m, "llama.cpp");
  const RopeConfig& rope = m.rope;
  if (m.arch() == Arch::llama) {
    must_scale(limits, rope, {"linear", "yarn", "llama3"});
  } else if (m.arch() == Arch::phi3) {
    must_scale(limits, rope, {"longrope"});
  } else {
    must_scale(limits, rope, {"linear", "yarn"});
  }
  if (rope.type == "yarn") {
    limits.must(rope.attention == 0, "attention_factor", "takes it for 0.1 ln(factor) + 1");
    limits.must(rope.beta_fast == 32, "beta_fast", "takes it for 32");
    limits.must(rope.beta_slow == 1, "beta_slow", "takes it for 1");
    limits.must(rope.mscale == 0 && rope.mscale_all == 0, "mscale", "does not have it");
    limits.must(rope.truncate, "truncate", "takes it for true");
  }
  if (m.arch() == Arch::olmo2)
    limits.must(m.head_dim * m.heads == m.hidden, "head_dim",
                "takes it for hidden_size / num_attention_heads");
  if (one_of(m.arch(), {Arch::olmo2, Arch::smollm3}))
    limits.must(!m.attention_bias, "attention_bias", "has no biases");
  if (m.arch() == Arch::smollm3) {
    limits.must(!m.mlp_bias, "mlp_bias", "has no biases");
    limits.must(m.window == 0, "use_sliding_window", "sees all tokens before");
    for (std::int64_t i = 0; i < m.layers; ++i)
      limits.must(m.turning[std::size_t(i)] == ((i + 1) % 4 != 0), "no_rope_layers",
                  "leaves out every fourth layer, expected that");
  }
  if (one_of(m.arch(), {Arch::gemma2, Arch::gemma3}))
    limits.must(m.query_scale == double(llama_cpp_query_scale(m)), "query_pre_attn_scalar",
                "of this size takes it for " + std::to_string(llama_cpp_query_scale(m)));
  if (m.arch() == Arch::gemma2) {
    limits.must(m.attention_softcap != 0, "attn_logit_softcapping", "always has it");
    limits.must(m.logit_softcap != 0, "final_logit_softcapping", "always has it");
    limits.must(m.period != 1, "layer_types", "always has layers with a sliding window");
    limits.must(m.window != 0, "sliding_window", "always has one");
    limits.must(m.tied, "tie_word_embeddings", "has no head of its own");
  }
  if (m.experts != 0) {
    const bool norms = m.arch() != Arch::qwen2moe;
    limits.must(m.norm_topk == norms, "norm_topk_prob",
                std::string("takes it for ") + (norms ? "true" : "false"));
    limits.must(m.sparse_step == 1 && m.dense_layers.empty(),
                m.sparse_step != 1 ? "decoder_sparse_step" : "mlp_only_layers",
                "has experts in every layer");
  }
  limits.must(m.key_dim == m.value_dim, "linear_key_head_dim",
              "has one number for it and \"linear_value_head_dim\"");
  return limits.status();
}

Status check_mlx_lm(const ModelConfig& m) {
  Limits limits(m, "mlx-lm");
  const RopeConfig& rope = m.rope;
  if (m.arch() == Arch::phi3) {
    must_scale(limits, rope, {"longrope"});
  } else if (one_of(m.arch(), {Arch::gemma2, Arch::qwen2moe, Arch::qwen3moe}) || m.is("mixtral")) {
    must_scale(limits, rope, {});
  }
  if (rope.type == "yarn") {
    limits.must(rope.attention == 0, "attention_factor", "takes it for 0.1 ln(factor) + 1");
    limits.must((rope.mscale == 0) == (rope.mscale_all == 0), "mscale",
                "computes something else without \"mscale_all_dim\"");
    limits.must(rope.truncate, "truncate", "takes it for true");
  }
  if (rope.type == "longrope")
    limits.must(rope.attention == 0, "attention_factor",
                "takes it for sqrt(1 + ln(s) / ln(original_max_position_embeddings)), s = "
                "max_position_embeddings / original_max_position_embeddings");
  if (m.is("mixtral"))
    limits.must(m.head_dim == m.hidden / m.heads, "head_dim",
                "takes it for hidden_size / num_attention_heads");
  if (m.arch() == Arch::gemma2) {
    limits.must(m.attention_softcap != 0, "attn_logit_softcapping", "always has it");
    limits.must(m.logit_softcap != 0, "final_logit_softcapping", "always has it");
    limits.must(m.tied, "tie_word_embeddings", "has no head of its own");
  }
  if (m.arch() == Arch::gemma3) {
    limits.must(m.logit_softcap == 0, "final_logit_softcapping", "does not have it");
    limits.must(m.period <= m.layers, "layer_types", "needs a layer with full attention");
  }
  if (m.arch() == Arch::qwen2moe) {
    limits.must(m.attention_bias, "qkv_bias", "takes it for true");
    limits.must(!m.norm_topk, "norm_topk_prob", "takes it for false");
    limits.must(m.sparse_step == 1 && m.dense_layers.empty(),
                m.sparse_step != 1 ? "decoder_sparse_step" : "mlp_only_layers",
                "has experts in every layer");
  }
  return limits.status();
}

std::vector<std::string> differences(const ModelConfig& m, World to) {
  std::vector<std::string> notes;
  if (to == World::hf) return notes;
  const std::string of =
      (to == World::gguf ? "llama.cpp's " : "mlx-lm's ") + std::string(m.type->name);
  const bool no_window = m.arch() == Arch::llama || m.arch() == Arch::phi3 ||
                         (m.arch() == Arch::gemma2 && to == World::mlx);
  if (no_window && m.window != 0 && m.window < m.context)
    notes.push_back("sliding_window " + std::to_string(m.window) + ": " + of +
                    " sees all tokens before, not the last of them only");
  if (m.rope.type == "longrope" && m.rope.short_factors != m.rope.long_factors)
    notes.push_back("short_factor: " + of +
                    (to == World::gguf
                         ? " takes it or long_factor by the size of its context, not by the "
                           "length of the text"
                         : " takes long_factor for texts of any length"));
  if (m.arch() == Arch::gemma2 && to == World::gguf && m.period != 2)
    notes.push_back("layer_types: one layer in " + std::to_string(m.period) +
                    " sees all tokens before; releases of llama.cpp that do not read "
                    "gemma2.attention.sliding_window_pattern take it for one in 2");
  if (to == World::gguf && !m.unread.empty()) {
    std::string all;
    for (const std::string& key : m.unread) all.append(all.empty() ? "" : ", ").append(key);
    notes.push_back("config.json: not carried into GGUF: " + all);
  }
  if (m.tied && !has_tied(m.arch(), to))
    notes.push_back("tie_word_embeddings: the embedding is written twice, as " + of +
                    " has a head of its own");
  return notes;
}

}  // namespace bittern
