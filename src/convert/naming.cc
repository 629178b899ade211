#include "convert/naming.h"

#include <algorithm>
#include <array>
#include <map>
#include <string_view>
#include <tuple>
#include <utility>

namespace bittern {
namespace {

// When a layer has a quantity.
enum class When {
  once,
  always,
  attention,
  attention_bias,
  dense,
  mlp_bias,
  experts,
  shared,
  delta
};

// How its values differ from Hugging Face's.
enum class Fold { none, norm, a_log };

using Archs = unsigned;
constexpr Archs only(Arch arch) { return 1u << static_cast<unsigned>(arch); }
constexpr Archs kAll = ~0u;
constexpr Archs kPhi = only(Arch::phi3);  // whose q, k, v are one tensor, and gate and up
constexpr Archs kOlmo = only(Arch::olmo2);
constexpr Archs kDelta = only(Arch::qwen3next) | only(Arch::qwen35) | only(Arch::qwen35moe);
constexpr Archs kQwen2 = only(Arch::qwen2) | only(Arch::qwen2moe);
constexpr Archs kQwen3 = only(Arch::qwen3) | only(Arch::qwen3moe);
constexpr Archs kLlama = only(Arch::llama) | only(Arch::smollm3);
constexpr Archs kTwoNorms = kLlama | kQwen2 | kQwen3 | kPhi;
constexpr Archs kHeadNorms = kDelta | only(Arch::gemma3) | kQwen3 | kOlmo;
constexpr Archs kGemma = only(Arch::gemma2) | only(Arch::gemma3);

// A quantity that is a tensor of its own, under these names. For others see composed().
struct Plain {
  Q quantity;
  Archs archs;
  When when;
  Fold fold;
  const char* gguf;
  const char* hf;  // and mlx
  Shape (*shape)(const ModelConfig&);
};

Shape hidden(const ModelConfig& m) { return {m.hidden}; }
Shape vocabulary(const ModelConfig& m) { return {m.vocab, m.hidden}; }
// The gated delta models' q has a gate of its size beside it, head by head.
std::int64_t q_rows(const ModelConfig& m) {
  return m.heads * m.head_dim * (m.gated_delta() ? 2 : 1);
}
std::int64_t kv_rows(const ModelConfig& m) { return m.kv_heads * m.head_dim; }
// olmo2 norms all heads together.
Shape q_norm(const ModelConfig& m) { return {m.arch() == Arch::olmo2 ? q_rows(m) : m.head_dim}; }
Shape k_norm(const ModelConfig& m) { return {m.arch() == Arch::olmo2 ? kv_rows(m) : m.head_dim}; }
std::int64_t key_rows(const ModelConfig& m) { return m.key_heads * m.key_dim; }
std::int64_t value_rows(const ModelConfig& m) { return m.value_heads * m.value_dim; }

constexpr Plain kPlain[] = {
    {Q::embedding, kAll, When::once, Fold::none, "token_embd.weight", "embed_tokens.weight",
     vocabulary},
    {Q::final_norm, kAll, When::once, Fold::norm, "output_norm.weight", "norm.weight", hidden},
    {Q::head, kAll, When::once, Fold::none, "output.weight", "lm_head.weight", vocabulary},

    {Q::input_norm, kAll & ~kOlmo, When::always, Fold::norm, "attn_norm.weight",
     "input_layernorm.weight", hidden},
    {Q::attention_norm, kTwoNorms, When::always, Fold::norm, "ffn_norm.weight",
     "post_attention_layernorm.weight", hidden},
    {Q::attention_norm, kGemma | kDelta | kOlmo, When::always, Fold::norm,
     "post_attention_norm.weight", "post_attention_layernorm.weight", hidden},
    {Q::before_ffn_norm, kGemma, When::always, Fold::norm, "ffn_norm.weight",
     "pre_feedforward_layernorm.weight", hidden},
    {Q::after_ffn_norm, kGemma | kOlmo, When::always, Fold::norm, "post_ffw_norm.weight",
     "post_feedforward_layernorm.weight", hidden},

    {Q::q, kAll & ~kPhi, When::attention, Fold::none, "attn_q.weight", "self_attn.q_proj.weight",
     [](const ModelConfig& m) { return Shape{q_rows(m), m.hidden}; }},
    {Q::k, kAll & ~kPhi, When::attention, Fold::none, "attn_k.weight", "self_attn.k_proj.weight",
     [](const ModelConfig& m) { return Shape{kv_rows(m), m.hidden}; }},
    {Q::v, kAll & ~kPhi, When::attention, Fold::none, "attn_v.weight", "self_attn.v_proj.weight",
     [](const ModelConfig& m) { return Shape{kv_rows(m), m.hidden}; }},
    {Q::o, kAll, When::attention, Fold::none, "attn_output.weight", "self_attn.o_proj.weight",
     [](const ModelConfig& m) { return Shape{m.hidden, m.heads * m.head_dim}; }},
    {Q::q_bias, kLlama | kQwen2 | kOlmo, When::attention_bias, Fold::none, "attn_q.bias",
     "self_attn.q_proj.bias", [](const ModelConfig& m) { return Shape{q_rows(m)}; }},
    {Q::k_bias, kLlama | kQwen2 | kOlmo, When::attention_bias, Fold::none, "attn_k.bias",
     "self_attn.k_proj.bias", [](const ModelConfig& m) { return Shape{kv_rows(m)}; }},
    {Q::v_bias, kLlama | kQwen2 | kOlmo, When::attention_bias, Fold::none, "attn_v.bias",
     "self_attn.v_proj.bias", [](const ModelConfig& m) { return Shape{kv_rows(m)}; }},
    {Q::o_bias, kLlama | kOlmo, When::attention_bias, Fold::none, "attn_output.bias",
     "self_attn.o_proj.bias", hidden},
    {Q::q_norm, kHeadNorms, When::attention, Fold::norm, "attn_q_norm.weight",
     "self_attn.q_norm.weight", q_norm},
    {Q::k_norm, kHeadNorms, When::attention, Fold::norm, "attn_k_norm.weight",
     "self_attn.k_norm.weight", k_norm},

    {Q::gate, kAll & ~kPhi, When::dense, Fold::none, "ffn_gate.weight", "mlp.gate_proj.weight",
     [](const ModelConfig& m) { return Shape{m.feed_forward, m.hidden}; }},
    {Q::up, kAll & ~kPhi, When::dense, Fold::none, "ffn_up.weight", "mlp.up_proj.weight",
     [](const ModelConfig& m) { return Shape{m.feed_forward, m.hidden}; }},
    {Q::down, kAll, When::dense, Fold::none, "ffn_down.weight", "mlp.down_proj.weight",
     [](const ModelConfig& m) { return Shape{m.hidden, m.feed_forward}; }},
    {Q::gate_bias, kAll, When::mlp_bias, Fold::none, "ffn_gate.bias", "mlp.gate_proj.bias",
     [](const ModelConfig& m) { return Shape{m.feed_forward}; }},
    {Q::up_bias, kAll, When::mlp_bias, Fold::none, "ffn_up.bias", "mlp.up_proj.bias",
     [](const ModelConfig& m) { return Shape{m.feed_forward}; }},
    {Q::down_bias, kAll, When::mlp_bias, Fold::none, "ffn_down.bias", "mlp.down_proj.bias", hidden},
    {Q::router, kDelta | kQwen3 | kQwen2, When::experts, Fold::none, "ffn_gate_inp.weight",
     "mlp.gate.weight", [](const ModelConfig& m) { return Shape{m.experts, m.hidden}; }},
    {Q::router, only(Arch::llama), When::experts, Fold::none, "ffn_gate_inp.weight",
     "block_sparse_moe.gate.weight",
     [](const ModelConfig& m) { return Shape{m.experts, m.hidden}; }},
    {Q::shared_gate, kAll, When::shared, Fold::none, "ffn_gate_shexp.weight",
     "mlp.shared_expert.gate_proj.weight",
     [](const ModelConfig& m) { return Shape{m.shared_feed_forward, m.hidden}; }},
    {Q::shared_up, kAll, When::shared, Fold::none, "ffn_up_shexp.weight",
     "mlp.shared_expert.up_proj.weight",
     [](const ModelConfig& m) { return Shape{m.shared_feed_forward, m.hidden}; }},
    {Q::shared_down, kAll, When::shared, Fold::none, "ffn_down_shexp.weight",
     "mlp.shared_expert.down_proj.weight",
     [](const ModelConfig& m) { return Shape{m.hidden, m.shared_feed_forward}; }},

    {Q::delta_norm, kDelta, When::delta, Fold::none, "ssm_norm.weight", "linear_attn.norm.weight",
     [](const ModelConfig& m) { return Shape{m.value_dim}; }},
    {Q::a_log, kDelta, When::delta, Fold::a_log, "ssm_a", "linear_attn.A_log",
     [](const ModelConfig& m) { return Shape{m.value_heads}; }},
    {Q::dt_bias, kDelta, When::delta, Fold::none, "ssm_dt.bias", "linear_attn.dt_bias",
     [](const ModelConfig& m) { return Shape{m.value_heads}; }},
    {Q::delta_out, kDelta, When::delta, Fold::none, "ssm_out.weight", "linear_attn.out_proj.weight",
     [](const ModelConfig& m) { return Shape{m.hidden, value_rows(m)}; }},
};

bool has(const ModelConfig& m, When when, std::int64_t layer) {
  if (layer < 0) return when == When::once;
  switch (when) {
    case When::once: return false;
    case When::always: return true;
    case When::attention: return !m.is_linear(layer);
    case When::attention_bias: return m.attention_bias;
    case When::dense: return m.is_dense(layer);
    case When::mlp_bias: return m.mlp_bias;
    case When::experts: return !m.is_dense(layer);
    case When::shared: return !m.is_dense(layer) && m.shared_feed_forward != 0;
    case When::delta: return m.is_linear(layer);
  }
  return false;
}

// From Hugging Face's values to the world's.
ValueMap value_map(const ModelConfig& m, Fold fold, World world) {
  if (world == World::hf || fold == Fold::none) return ValueMap::same;
  if (fold == Fold::a_log) return world == World::gguf ? ValueMap::negative_exp : ValueMap::same;
  if (m.gated_delta()) return ValueMap::plus_one;
  const bool gemma = (kGemma & only(m.arch())) != 0;  // whose mlx-lm models add the 1 themselves
  return gemma && world != World::mlx ? ValueMap::plus_one : ValueMap::same;
}

Fold fold_of(Q quantity) {
  for (const Plain& row : kPlain)
    if (row.quantity == quantity) return row.fold;
  return Fold::none;
}

// The tensors a model has in a world.
class Naming {
 public:
  Naming(const ModelConfig& model, World world, const Prefixes& prefixes, bool target)
      : m_(model), world_(world), prefixes_(prefixes), target_(target) {}

  std::vector<Part> parts(std::int64_t layer) const {
    std::vector<Part> all;
    for (const Plain& row : kPlain) {
      if ((row.archs & only(m_.arch())) == 0 || !has(m_, row.when, layer)) continue;
      if (row.quantity == Q::head && m_.tied) {
        if (target_ && !has_tied(m_.arch(), world_))
          all.push_back(compose(name(layer, row.gguf, row.hf), vocabulary(m_), m_.hidden,
                                {{Q::embedding, 0, m_.vocab}}));
        continue;
      }
      all.push_back(plain(row, layer));
    }
    if (layer < 0) return all;
    if (m_.arch() == Arch::phi3) add_fused(layer, all);
    if (has(m_, When::experts, layer)) add_experts(layer, all);
    if (has(m_, When::shared, layer)) {
      // llama.cpp drops the dimension of 1.
      const Shape shape = gguf() ? Shape{m_.hidden} : Shape{1, m_.hidden};
      all.push_back(
          compose(name(layer, "ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight"), shape,
                  m_.hidden, {{Q::shared_router, 0, 1}}));
    }
    if (has(m_, When::delta, layer)) add_delta(layer, all);
    return all;
  }

 private:
  bool gguf() const { return world_ == World::gguf; }
  // llama.cpp's qwen35 has the value heads of all key heads in turns: 0 of each, 1 of each, ...
  bool tiled() const {
    return gguf() && m_.arch() != Arch::qwen3next && per_key() > 1 && !m_.value_heads_as_stored;
  }
  std::int64_t per_key() const { return m_.gated_delta() ? m_.value_heads / m_.key_heads : 1; }

  std::string name(std::int64_t layer, std::string_view gguf_name, std::string_view hf) const {
    std::string text;
    if (layer < 0) {
      if (gguf()) return text.append(gguf_name);
      return text.append(hf == "lm_head.weight" ? prefixes_.head : prefixes_.body).append(hf);
    }
    text = gguf() ? "blk." : prefixes_.body + "layers.";
    return text.append(std::to_string(layer)).append(".").append(gguf() ? gguf_name : hf);
  }

  static Part compose(std::string name, const Shape& shape, std::int64_t width,
                      std::vector<Rows> rows) {
    Part part;
    part.name = std::move(name);
    part.shape = shape;
    part.width = width;
    part.rows = std::move(rows);
    part.whole = part.rows.size() == 1 && part.rows[0].first == 0 && part.rows[0].step == 1 &&
                 part.rows[0].count == part.row_count();
    return part;
  }

  Part plain(const Plain& row, std::int64_t layer) const {
    const Shape shape = row.shape(m_);
    const auto rows = moved_rows(row.quantity);
    const bool vector_moves = shape.rank == 1 && !rows.empty();
    const std::int64_t width = vector_moves ? 1 : shape[shape.rank - 1];
    Part part =
        compose(name(layer, row.gguf, row.hf), shape, width,
                rows.empty() ? std::vector<Rows>{{row.quantity, 0, shape.numel() / width}} : rows);
    part.map = value_map(m_, row.fold, world_);
    if (row.quantity == Q::delta_out && tiled()) {
      part.column_block = m_.value_dim;
      for (std::int64_t i = 0; i < m_.value_heads; ++i) part.columns.push_back(tiled_head(i));
    }
    return part;
  }

  // The rows of a quantity that llama.cpp has in another order; empty: in the same.
  std::vector<Rows> moved_rows(Q quantity) const {
    const bool query = quantity == Q::q || quantity == Q::q_bias;
    if (gguf() && (kLlama & only(m_.arch())) != 0 &&
        (query || quantity == Q::k || quantity == Q::k_bias)) {
      // Rotary pairs are (i, i + D/2) of a head in Hugging Face's order, neighbours in llama.cpp's.
      std::vector<Rows> rows;
      const std::int64_t heads = query ? m_.heads : m_.kv_heads, half = m_.head_dim / 2;
      for (std::int64_t h = 0; h < heads; ++h)
        for (std::int64_t i = 0; i < half; ++i)
          rows.push_back({quantity, h * m_.head_dim + i, 2, half});
      return rows;
    }
    if (tiled() && (quantity == Q::a_log || quantity == Q::dt_bias))
      return value_heads(quantity, 1);
    return {};
  }

  std::int64_t tiled_head(std::int64_t i) const {
    return i % m_.key_heads * per_key() + i / m_.key_heads;
  }
  // Value heads in the world's order, `each` rows a head.
  std::vector<Rows> value_heads(Q quantity, std::int64_t each) const {
    if (!tiled()) return {{quantity, 0, m_.value_heads * each}};
    std::vector<Rows> rows;
    for (std::int64_t i = 0; i < m_.value_heads; ++i)
      rows.push_back({quantity, tiled_head(i) * each, each});
    return rows;
  }

  void add_experts(std::int64_t layer, std::vector<Part>& all) const {
    const std::int64_t count = m_.experts, inner = m_.expert_feed_forward;
    struct Kind {
      Q quantity;
      const char* gguf;
      const char* hf;
      const char* mixtral;
      std::int64_t rows, columns;
    };
    const std::array<Kind, 3> kinds{{
        {Q::gate_experts, "gate", "gate_proj", "w1", inner, m_.hidden},
        {Q::up_experts, "up", "up_proj", "w3", inner, m_.hidden},
        {Q::down_experts, "down", "down_proj", "w2", m_.hidden, inner},
    }};
    const bool mixtral = m_.arch() == Arch::llama;
    const std::string block = mixtral ? "block_sparse_moe." : "mlp.";
    if (world_ == World::hf) {
      for (std::int64_t e = 0; e < count; ++e)
        for (const Kind& kind : kinds) {
          all.push_back(compose(name(layer, "",
                                     block + "experts." + std::to_string(e) + "." +
                                         (mixtral ? kind.mixtral : kind.hf) + ".weight"),
                                {kind.rows, kind.columns}, kind.columns,
                                {{kind.quantity, e * kind.rows, kind.rows}}));
          all.back().whole = count == 1;
        }
    } else {
      for (const Kind& kind : kinds)
        all.push_back(compose(name(layer, "ffn_" + std::string(kind.gguf) + "_exps.weight",
                                   block + "switch_mlp." + kind.hf + ".weight"),
                              {count, kind.rows, kind.columns}, kind.columns,
                              {{kind.quantity, 0, count * kind.rows}}));
    }
    // Forms that are read: gate and up of an expert behind each other, in one stack.
    if (world_ == World::mlx) return;
    std::vector<Rows> both;
    for (std::int64_t e = 0; e < count; ++e) {
      both.push_back({Q::gate_experts, e * inner, inner});
      both.push_back({Q::up_experts, e * inner, inner});
    }
    all.push_back(compose(name(layer, "ffn_gate_up_exps.weight", "mlp.experts.gate_up_proj"),
                          {count, 2 * inner, m_.hidden}, m_.hidden, std::move(both)));
    all.back().written = false;
    if (world_ != World::hf) return;
    all.push_back(compose(name(layer, "", "mlp.experts.down_proj"), {count, m_.hidden, inner},
                          inner, {{Q::down_experts, 0, count * m_.hidden}}));
    all.back().written = false;
  }

  void add_fused(std::int64_t layer, std::vector<Part>& all) const {
    const std::int64_t q = q_rows(m_), kv = kv_rows(m_), inner = m_.feed_forward;
    all.push_back(compose(name(layer, "attn_qkv.weight", "self_attn.qkv_proj.weight"),
                          {q + 2 * kv, m_.hidden}, m_.hidden,
                          {{Q::q, 0, q}, {Q::k, 0, kv}, {Q::v, 0, kv}}));
    all.push_back(compose(name(layer, "ffn_up.weight", "mlp.gate_up_proj.weight"),
                          {2 * inner, m_.hidden}, m_.hidden,
                          {{Q::gate, 0, inner}, {Q::up, 0, inner}}));
    if (!gguf()) return;
    // llama.cpp also reads q, k and v apart.
    for (const auto& [quantity, gguf_name, rows] :
         {std::tuple{Q::q, "attn_q.weight", q}, std::tuple{Q::k, "attn_k.weight", kv},
          std::tuple{Q::v, "attn_v.weight", kv}}) {
      all.push_back(
          compose(name(layer, gguf_name, ""), {rows, m_.hidden}, m_.hidden, {{quantity, 0, rows}}));
      all.back().written = false;
    }
  }

  static void append(std::vector<Rows>& to, const std::vector<Rows>& more) {
    to.insert(to.end(), more.begin(), more.end());
  }

  void add_delta(std::int64_t layer, std::vector<Part>& all) const {
    const std::int64_t keys = key_rows(m_), values = value_rows(m_), channels = 2 * keys + values;
    // Channels of the convolution are q, k and v in all worlds; its kernel has a dimension of 1 in
    // two of them.
    std::vector<Rows> conv{{Q::conv_q, 0, keys}, {Q::conv_k, 0, keys}};
    append(conv, value_heads(Q::conv_v, m_.value_dim));
    const Shape kernel = world_ == World::hf    ? Shape{channels, 1, m_.conv_kernel}
                         : world_ == World::mlx ? Shape{channels, m_.conv_kernel, 1}
                                                : Shape{channels, m_.conv_kernel};
    all.push_back(compose(name(layer, "ssm_conv1d.weight", "linear_attn.conv1d.weight"), kernel,
                          m_.conv_kernel, std::move(conv)));

    if (gguf() || m_.arch() != Arch::qwen3next) {
      std::vector<Rows> qkv{{Q::delta_q, 0, keys}, {Q::delta_k, 0, keys}};
      append(qkv, value_heads(Q::delta_v, m_.value_dim));
      all.push_back(compose(name(layer, "attn_qkv.weight", "linear_attn.in_proj_qkv.weight"),
                            {channels, m_.hidden}, m_.hidden, std::move(qkv)));
      all.push_back(compose(name(layer, "attn_gate.weight", "linear_attn.in_proj_z.weight"),
                            {values, m_.hidden}, m_.hidden, value_heads(Q::delta_z, m_.value_dim)));
    }
    if (m_.arch() == Arch::qwen3next) {
      // For each key head its q, k, and the v and z of its value heads.
      std::vector<Rows> qkvz, ba;
      const std::int64_t r = per_key(), key = m_.key_dim, value = r * m_.value_dim;
      for (std::int64_t h = 0; h < m_.key_heads; ++h) {
        append(qkvz, {{Q::delta_q, h * key, key}, {Q::delta_k, h * key, key}});
        append(qkvz, {{Q::delta_v, h * value, value}, {Q::delta_z, h * value, value}});
        append(ba, {{Q::delta_b, h * r, r}, {Q::delta_a, h * r, r}});
      }
      all.push_back(compose(name(layer, "ssm_in.weight", "linear_attn.in_proj_qkvz.weight"),
                            {channels + values, m_.hidden}, m_.hidden, std::move(qkvz)));
      all.back().written = !gguf();  // older files of llama.cpp have it
      all.push_back(compose(name(layer, "ssm_ba.weight", "linear_attn.in_proj_ba.weight"),
                            {2 * m_.value_heads, m_.hidden}, m_.hidden, std::move(ba)));
    } else {
      all.push_back(compose(name(layer, "ssm_beta.weight", "linear_attn.in_proj_b.weight"),
                            {m_.value_heads, m_.hidden}, m_.hidden, value_heads(Q::delta_b, 1)));
      all.push_back(compose(name(layer, "ssm_alpha.weight", "linear_attn.in_proj_a.weight"),
                            {m_.value_heads, m_.hidden}, m_.hidden, value_heads(Q::delta_a, 1)));
    }
  }

  const ModelConfig& m_;
  World world_;
  const Prefixes& prefixes_;
  bool target_;
};

// World::parts: what Hugging Face's tensors are made of, one by one.
std::vector<Part> quantities_of(const ModelConfig& model, std::int64_t layer) {
  const std::string before = layer < 0 ? "" : "layers." + std::to_string(layer) + ".";
  std::vector<Part> all;
  std::map<Q, std::size_t> found;
  for (const Part& part : Naming(model, World::hf, {}, true).parts(layer)) {
    if (!part.written) continue;
    for (const Rows& run : part.rows) {
      const auto [at, is_new] = found.emplace(run.quantity, all.size());
      if (is_new) {
        Part& own = all.emplace_back();
        own.name = before + std::string(name(run.quantity));
        own.width = part.width;
        own.rows = {{run.quantity, 0, 0}};
        own.map = value_map(model, fold_of(run.quantity), World::parts);
      }
      Part& own = all[at->second];
      own.rows[0].count = std::max(own.rows[0].count, run.first + (run.count - 1) * run.step + 1);
      const bool vector = part.whole && part.shape.rank == 1;
      own.shape = vector ? part.shape : Shape{own.rows[0].count, own.width};
    }
  }
  return all;
}

}  // namespace

std::vector<Part> tensors_of(const ModelConfig& model, World world, const Prefixes& prefixes,
                             std::int64_t layer, bool target) {
  if (world == World::parts) return quantities_of(model, layer);
  return Naming(model, world, prefixes, target).parts(layer);
}

}  // namespace bittern
