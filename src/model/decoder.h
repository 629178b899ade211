// A decoder as data: what each layer is made of. The forward pass (forward.cc) is one for all of
// them; an architecture is what describe() makes of its configuration.
//
//   x = embedding(token) * embedding_scale
//   each layer:  x = x + after(mixer(before(x)))
//                x = x + after_mlp(mlp(before_mlp(x)))
//   logits = cap(head(final_norm(x)))
//
// where before, after, ... are RMS norms, or nothing where the layer has none.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "bittern/gdn_desc.h"
#include "bittern/layers_desc.h"
#include "bittern/status.h"
#include "convert/model_config.h"

namespace bittern {

// Rotary embedding: how fast each pair of a head turns.
struct RotaryTable {
  std::vector<float> frequencies;  // [rotary_dim / 2]
  double factor = 1;               // of cos and sin
};

struct AttentionSpec {
  std::int64_t window = 0;  // tokens that a query sees; 0: all
  int rotary = 0;           // of Decoder::rotary; -1: heads do not turn
};

struct LayerSpec {
  bool delta = false;    // the mixer is a gated delta net; otherwise attention
  bool experts = false;  // the MLP has experts; otherwise it is dense
  AttentionSpec attention = {};
};

enum class HeadNorm { none, each, all };  // of q and k: each head by itself, or all as one row

struct Decoder {
  std::int64_t hidden = 0, vocab = 0, context = 0;
  double eps = 0;
  double embedding_scale = 1;
  double logit_softcap = 0;  // 0: none
  bool tied = false;         // the head is the embedding

  // Attention.
  std::int64_t heads = 0, kv_heads = 0, dim = 0, rotary_dim = 0;
  double attention_scale = 0;
  double attention_softcap = 0;
  HeadNorm head_norm = HeadNorm::none;
  bool gate = false;  // q has a gate of its size beside it, head by head: out * sigmoid(gate)
  std::vector<RotaryTable> rotary;

  // The gated delta net.
  std::int64_t key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0;
  std::int32_t conv_width = 0;
  HeadMap head_map = HeadMap::grouped;

  // MLP.
  GatedKind activation = GatedKind::swiglu;
  std::int64_t experts = 0, experts_used = 0, expert_inner = 0;
  bool norm_topk = false;  // the weights of the experts used add up to 1

  std::vector<LayerSpec> layers;

  std::int64_t query_rows() const { return heads * dim * (gate ? 2 : 1); }
  std::int64_t key_rows() const { return kv_heads * dim; }
  std::int64_t delta_channels() const { return 2 * key_heads * key_dim + value_rows(); }
  std::int64_t value_rows() const { return value_heads * value_dim; }
  std::int64_t attention_layers() const;
};

// `context`: the number of tokens that sessions are made for, which decides between the two sets of
// factors that longrope has (as in llama.cpp); 0: the model's own.
Result<Decoder> describe(const ModelConfig& config, std::int64_t context);

}  // namespace bittern
