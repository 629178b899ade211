#include <algorithm>
#include <cmath>

#include "bittern/rope_frequencies.h"
#include "model/decoder.h"

namespace bittern {
namespace {

// `context`: tokens of the sessions to be made.
Result<RotaryTable> rotary_table(const ModelConfig& m, std::int64_t context) {
  const RopeConfig& rope = m.rope;
  RopeScaling scaling{.factor = rope.factor,
                      .original_context = static_cast<double>(rope.context),
                      .low_freq_factor = rope.low,
                      .high_freq_factor = rope.high,
                      .beta_fast = rope.beta_fast,
                      .beta_slow = rope.beta_slow,
                      .attention_factor = rope.attention,
                      .mscale = rope.mscale,
                      .mscale_all_dim = rope.mscale_all,
                      .truncate = rope.truncate};
  if (rope.type == "linear") {
    scaling.kind = RopeScalingKind::linear;
  } else if (rope.type == "llama3") {
    scaling.kind = RopeScalingKind::llama3;
  } else if (rope.type == "yarn") {
    scaling.kind = RopeScalingKind::yarn;
  } else if (rope.type != "default" && rope.type != "longrope") {
    return unsupported("rope_type \"" + rope.type +
                       "\" does not run, expected default, linear, llama3, yarn or longrope");
  }
  auto made = rope_frequencies(m.rotary_dim(), rope.theta, scaling);
  if (!made) return made.status();
  RotaryTable table{std::move(made->inverse), made->factor};
  if (rope.type == "longrope") {
    const bool fits = (context != 0 ? context : m.context) <= rope.context;
    const std::vector<double>& factors = fits ? rope.short_factors : rope.long_factors;
    for (std::size_t i = 0; i < table.frequencies.size(); ++i)
      table.frequencies[i] = static_cast<float>(table.frequencies[i] / factors[i]);
    table.factor =
        rope.attention != 0 ? rope.attention : usual_longrope_attention(m.context, rope.context);
  }
  return table;
}

}  // namespace

std::int64_t Decoder::attention_layers() const {
  return std::count_if(layers.begin(), layers.end(), [](const LayerSpec& l) { return !l.delta; });
}

Result<Decoder> describe(const ModelConfig& m, std::int64_t context) {
  Decoder d;
  const bool gemma = m.arch() == Arch::gemma2 || m.arch() == Arch::gemma3;
  d.hidden = m.hidden;
  d.vocab = m.vocab;
  d.context = m.context;
  d.eps = m.eps;
  d.embedding_scale = gemma ? std::sqrt(static_cast<double>(m.hidden)) : 1;
  d.logit_softcap = m.logit_softcap;
  d.tied = m.tied;

  d.heads = m.heads;
  d.kv_heads = m.kv_heads;
  d.dim = m.head_dim;
  d.rotary_dim = m.rotary_dim();
  d.attention_scale = 1 / std::sqrt(gemma ? m.query_scale : static_cast<double>(m.head_dim));
  d.attention_softcap = m.attention_softcap;
  d.gate = m.gated_delta();
  switch (m.arch()) {
    case Arch::qwen3:
    case Arch::qwen3moe:
    case Arch::gemma3:
    case Arch::qwen3next:
    case Arch::qwen35:
    case Arch::qwen35moe: d.head_norm = HeadNorm::each; break;
    case Arch::olmo2: d.head_norm = HeadNorm::all; break;
    default: break;
  }
  auto table = rotary_table(m, context);
  if (!table) return table.status();
  d.rotary.push_back(std::move(*table));
  if (m.arch() == Arch::gemma3) {  // sliding layers turn at their own pace
    auto local = rope_frequencies(d.rotary_dim, m.rope.local_theta);
    if (!local) return local.status();
    d.rotary.push_back({std::move(local->inverse), local->factor});
  }

  d.key_heads = m.key_heads;
  d.value_heads = m.value_heads;
  d.key_dim = m.key_dim;
  d.value_dim = m.value_dim;
  d.conv_width = static_cast<std::int32_t>(m.conv_kernel);
  d.head_map = m.value_heads_as_stored ? HeadMap::tiled : HeadMap::grouped;

  d.activation = gemma ? GatedKind::geglu_tanh : GatedKind::swiglu;
  d.experts = m.experts;
  d.experts_used = m.experts_used;
  d.expert_inner = m.expert_feed_forward;
  d.norm_topk = m.norm_topk;

  for (std::int64_t i = 0; i < m.layers; ++i) {
    LayerSpec layer{.delta = m.is_linear(i), .experts = !m.is_dense(i)};
    const bool slides = m.window != 0 && (m.period == 0 || (i + 1) % m.period != 0);
    if (slides && !m.gated_delta()) layer.attention.window = m.window;
    if (gemma && slides && d.rotary.size() > 1) layer.attention.rotary = 1;
    if (!m.turning.empty() && !m.turning[static_cast<std::size_t>(i)]) layer.attention.rotary = -1;
    d.layers.push_back(layer);
  }
  return d;
}

}  // namespace bittern
