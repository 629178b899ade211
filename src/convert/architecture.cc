#include "convert/architecture.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <map>
#include <optional>
#include <set>

#include "convert/model.h"
#include "formats/json_events.h"

namespace bittern {
namespace {

using Json = nlohmann::ordered_json;

// ---- quantities: what the model is made of, whatever the world ----

// Each is numbers in rows, in Hugging Face's order. A world's tensor is rows of one or more of
// them.
enum class Q {
  embedding,
  final_norm,
  head,
  input_norm,
  q,
  k,
  v,
  o,
  q_bias,
  k_bias,
  v_bias,
  o_bias,
  q_norm,
  k_norm,
  attention_norm,  // after attention: before the feed forward unless there are two more
  before_ffn_norm,
  after_ffn_norm,
  gate,
  up,
  down,
  gate_bias,
  up_bias,
  down_bias,
  router,
  gate_experts,
  up_experts,
  down_experts,
  shared_router,
  shared_gate,
  shared_up,
  shared_down,
  delta_q,
  delta_k,
  delta_v,
  delta_z,
  delta_b,
  delta_a,
  conv_q,
  conv_k,
  conv_v,
  a_log,
  dt_bias,
  delta_norm,
  delta_out,
};

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
constexpr Archs kDelta = only(Arch::qwen3next) | only(Arch::qwen35) | only(Arch::qwen35moe);
constexpr Archs kQwen3 = only(Arch::qwen3) | only(Arch::qwen3moe);
constexpr Archs kTwoNorms = only(Arch::llama) | only(Arch::qwen2) | kQwen3;
constexpr Archs kGemma = only(Arch::gemma3);

// A quantity that is a tensor of its own, under these names. For others see composed().
struct Plain {
  Q quantity;
  Archs archs;
  When when;
  Fold fold;
  const char* gguf;
  const char* hf;  // and mlx
  Shape (*shape)(const Model&);
};

Shape hidden(const Model& m) { return {m.hidden}; }
Shape head_norm(const Model& m) { return {m.head_dim}; }
Shape vocabulary(const Model& m) { return {m.vocab, m.hidden}; }
// The gated delta models' q has a gate of its size beside it, head by head.
std::int64_t q_rows(const Model& m) { return m.heads * m.head_dim * (m.gated_delta() ? 2 : 1); }
std::int64_t kv_rows(const Model& m) { return m.kv_heads * m.head_dim; }
std::int64_t key_rows(const Model& m) { return m.key_heads * m.key_dim; }
std::int64_t value_rows(const Model& m) { return m.value_heads * m.value_dim; }

constexpr Plain kPlain[] = {
    {Q::embedding, kAll, When::once, Fold::none, "token_embd.weight", "embed_tokens.weight",
     vocabulary},
    {Q::final_norm, kAll, When::once, Fold::norm, "output_norm.weight", "norm.weight", hidden},
    {Q::head, kAll, When::once, Fold::none, "output.weight", "lm_head.weight", vocabulary},

    {Q::input_norm, kAll, When::always, Fold::norm, "attn_norm.weight", "input_layernorm.weight",
     hidden},
    {Q::attention_norm, kTwoNorms, When::always, Fold::norm, "ffn_norm.weight",
     "post_attention_layernorm.weight", hidden},
    {Q::attention_norm, kGemma | kDelta, When::always, Fold::norm, "post_attention_norm.weight",
     "post_attention_layernorm.weight", hidden},
    {Q::before_ffn_norm, kGemma, When::always, Fold::norm, "ffn_norm.weight",
     "pre_feedforward_layernorm.weight", hidden},
    {Q::after_ffn_norm, kGemma, When::always, Fold::norm, "post_ffw_norm.weight",
     "post_feedforward_layernorm.weight", hidden},

    {Q::q, kAll, When::attention, Fold::none, "attn_q.weight", "self_attn.q_proj.weight",
     [](const Model& m) { return Shape{q_rows(m), m.hidden}; }},
    {Q::k, kAll, When::attention, Fold::none, "attn_k.weight", "self_attn.k_proj.weight",
     [](const Model& m) { return Shape{kv_rows(m), m.hidden}; }},
    {Q::v, kAll, When::attention, Fold::none, "attn_v.weight", "self_attn.v_proj.weight",
     [](const Model& m) { return Shape{kv_rows(m), m.hidden}; }},
    {Q::o, kAll, When::attention, Fold::none, "attn_output.weight", "self_attn.o_proj.weight",
     [](const Model& m) { return Shape{m.hidden, m.heads * m.head_dim}; }},
    {Q::q_bias, kTwoNorms, When::attention_bias, Fold::none, "attn_q.bias", "self_attn.q_proj.bias",
     [](const Model& m) { return Shape{q_rows(m)}; }},
    {Q::k_bias, kTwoNorms, When::attention_bias, Fold::none, "attn_k.bias", "self_attn.k_proj.bias",
     [](const Model& m) { return Shape{kv_rows(m)}; }},
    {Q::v_bias, kTwoNorms, When::attention_bias, Fold::none, "attn_v.bias", "self_attn.v_proj.bias",
     [](const Model& m) { return Shape{kv_rows(m)}; }},
    {Q::o_bias, only(Arch::llama), When::attention_bias, Fold::none, "attn_output.bias",
     "self_attn.o_proj.bias", hidden},
    {Q::q_norm, kDelta | kGemma | kQwen3, When::attention, Fold::norm, "attn_q_norm.weight",
     "self_attn.q_norm.weight", head_norm},
    {Q::k_norm, kDelta | kGemma | kQwen3, When::attention, Fold::norm, "attn_k_norm.weight",
     "self_attn.k_norm.weight", head_norm},

    {Q::gate, kAll, When::dense, Fold::none, "ffn_gate.weight", "mlp.gate_proj.weight",
     [](const Model& m) { return Shape{m.feed_forward, m.hidden}; }},
    {Q::up, kAll, When::dense, Fold::none, "ffn_up.weight", "mlp.up_proj.weight",
     [](const Model& m) { return Shape{m.feed_forward, m.hidden}; }},
    {Q::down, kAll, When::dense, Fold::none, "ffn_down.weight", "mlp.down_proj.weight",
     [](const Model& m) { return Shape{m.hidden, m.feed_forward}; }},
    {Q::gate_bias, kAll, When::mlp_bias, Fold::none, "ffn_gate.bias", "mlp.gate_proj.bias",
     [](const Model& m) { return Shape{m.feed_forward}; }},
    {Q::up_bias, kAll, When::mlp_bias, Fold::none, "ffn_up.bias", "mlp.up_proj.bias",
     [](const Model& m) { return Shape{m.feed_forward}; }},
    {Q::down_bias, kAll, When::mlp_bias, Fold::none, "ffn_down.bias", "mlp.down_proj.bias", hidden},
    {Q::router, kDelta | kQwen3, When::experts, Fold::none, "ffn_gate_inp.weight",
     "mlp.gate.weight", [](const Model& m) { return Shape{m.experts, m.hidden}; }},
    {Q::router, only(Arch::llama), When::experts, Fold::none, "ffn_gate_inp.weight",
     "block_sparse_moe.gate.weight", [](const Model& m) { return Shape{m.experts, m.hidden}; }},
    {Q::shared_gate, kAll, When::shared, Fold::none, "ffn_gate_shexp.weight",
     "mlp.shared_expert.gate_proj.weight",
     [](const Model& m) { return Shape{m.shared_feed_forward, m.hidden}; }},
    {Q::shared_up, kAll, When::shared, Fold::none, "ffn_up_shexp.weight",
     "mlp.shared_expert.up_proj.weight",
     [](const Model& m) { return Shape{m.shared_feed_forward, m.hidden}; }},
    {Q::shared_down, kAll, When::shared, Fold::none, "ffn_down_shexp.weight",
     "mlp.shared_expert.down_proj.weight",
     [](const Model& m) { return Shape{m.hidden, m.shared_feed_forward}; }},

    {Q::delta_norm, kDelta, When::delta, Fold::none, "ssm_norm.weight", "linear_attn.norm.weight",
     [](const Model& m) { return Shape{m.value_dim}; }},
    {Q::a_log, kDelta, When::delta, Fold::a_log, "ssm_a", "linear_attn.A_log",
     [](const Model& m) { return Shape{m.value_heads}; }},
    {Q::dt_bias, kDelta, When::delta, Fold::none, "ssm_dt.bias", "linear_attn.dt_bias",
     [](const Model& m) { return Shape{m.value_heads}; }},
    {Q::delta_out, kDelta, When::delta, Fold::none, "ssm_out.weight", "linear_attn.out_proj.weight",
     [](const Model& m) { return Shape{m.hidden, value_rows(m)}; }},
};

bool has(const Model& m, When when, std::int64_t layer) {
  if (layer < 0) return when == When::once;
  switch (when) {
    case When::once: return false;
    case When::always: return true;
    case When::attention: return !m.is_linear(layer);
    case When::attention_bias: return m.attention_bias || m.arch() == Arch::qwen2;
    case When::dense: return m.experts == 0;
    case When::mlp_bias: return m.mlp_bias;
    case When::experts: return m.experts != 0;
    case When::shared: return m.shared_feed_forward != 0;
    case When::delta: return m.is_linear(layer);
  }
  return false;
}

// From Hugging Face's values to the world's.
ValueMap value_map(const Model& m, Fold fold, World world) {
  if (world == World::hf || fold == Fold::none) return ValueMap::same;
  if (fold == Fold::a_log) return world == World::gguf ? ValueMap::negative_exp : ValueMap::same;
  if (m.gated_delta()) return ValueMap::plus_one;
  const bool gemma = m.arch() == Arch::gemma3;  // whose mlx-lm model adds the 1 itself
  return gemma && world == World::gguf ? ValueMap::plus_one : ValueMap::same;
}

ValueMap inverse(ValueMap map) {
  switch (map) {
    case ValueMap::plus_one: return ValueMap::minus_one;
    case ValueMap::minus_one: return ValueMap::plus_one;
    case ValueMap::negative_exp: return ValueMap::log_negative;
    case ValueMap::log_negative: return ValueMap::negative_exp;
    case ValueMap::same: break;
  }
  return ValueMap::same;
}

// One of the two is Hugging Face's, or they are the same.
ValueMap between(ValueMap from, ValueMap to) {
  if (from == to) return ValueMap::same;
  return from == ValueMap::same ? to : inverse(from);
}

// ---- tensors of a world ----

struct Rows {
  Q quantity;
  std::int64_t first, count, step = 1;
};

struct Part {
  std::string name;
  Shape shape;
  std::int64_t width = 1;  // of a row
  std::vector<Rows> rows;  // one that starts at 0 with step 1: the whole quantity
  ValueMap map = ValueMap::same;
  std::int64_t column_block = 0;  // of quantity's columns, permuted
  std::vector<std::int64_t> columns;
  bool written = true;  // or a form that is read only
  bool whole = true;    // the rows are one quantity in its own order

  std::int64_t row_count() const { return shape.numel() / width; }
};

// The tensors a model has in a world.
class Naming {
 public:
  Naming(const Model& model, World world, std::string prefix, std::string head_prefix)
      : m_(model), world_(world), prefix_(std::move(prefix)), head_(std::move(head_prefix)) {}

  // All tensors of a layer; of the rest of the model where layer is -1.
  std::vector<Part> parts(std::int64_t layer) const {
    std::vector<Part> all;
    for (const Plain& row : kPlain) {
      if ((row.archs & only(m_.arch())) == 0 || !has(m_, row.when, layer)) continue;
      if (row.quantity == Q::head && m_.tied) continue;
      all.push_back(plain(row, layer));
    }
    if (layer < 0) return all;
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
  bool tiled() const { return gguf() && m_.arch() != Arch::qwen3next && per_key() > 1; }
  std::int64_t per_key() const { return m_.gated_delta() ? m_.value_heads / m_.key_heads : 1; }

  std::string name(std::int64_t layer, std::string_view gguf_name, std::string_view hf) const {
    std::string text;
    if (layer < 0) {
      if (gguf()) return text.append(gguf_name);
      return text.append(hf == "lm_head.weight" ? head_ : prefix_).append(hf);
    }
    text = gguf() ? "blk." : prefix_ + "layers.";
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
    if (gguf() && m_.arch() == Arch::llama &&
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

  const Model& m_;
  World world_;
  std::string prefix_, head_;
};

// ---- from one world's tensors to the other's ----

struct Place {
  std::int32_t part = -1;  // of the source's
  std::int64_t row = 0;
};

// Where the rows of a quantity lie in the source.
struct Where {
  std::int32_t whole = -1;  // the part that is the quantity
  std::vector<Place> rows;  // else

  Place at(std::int64_t row) const {
    if (whole >= 0) return {whole, row};
    return std::size_t(row) < rows.size() ? rows[std::size_t(row)] : Place{};
  }
};

Status missing(const std::vector<Part>& parts, Q quantity, std::int64_t row) {
  for (const Part& part : parts) {
    for (const Rows& run : part.rows) {
      if (run.quantity != quantity) continue;
      if (part.whole || (row >= run.first && row < run.first + run.count * run.step))
        return invalid("no tensor " + in_quotes(part.name) + ", expected one as the config says");
    }
  }
  return {Code::internal, "a tensor's rows are nowhere"};
}

// Of a vision model, but not of its language model.
bool sees(std::string_view name) {
  return name.find("visual.") != name.npos || name.find("vision_tower.") != name.npos ||
         name.find("multi_modal_projector.") != name.npos;
}

class Renamer {
 public:
  Renamer(const Model& model, std::span<const NamedShape> tensors, World from, World to)
      : m_(model), from_(from), to_(to) {
    for (const NamedShape& tensor : tensors) shapes_.emplace(tensor.name, &tensor.shape);
  }

  Result<Renaming> run() {
    const auto [prefix, head] = source_prefixes();
    const Naming source(m_, from_, prefix, head);
    const bool wrapped =
        to_ == World::mlx && (m_.arch() == Arch::qwen35 || m_.arch() == Arch::qwen35moe);
    const Naming target(m_, to_, wrapped ? "language_model.model." : "model.",
                        wrapped ? "language_model." : "");
    for (std::int64_t layer = -1; layer < m_.layers; ++layer)
      BITTERN_TRY(rename(source.parts(layer), target.parts(layer)));
    if (to_ == World::gguf && m_.rope.type == "llama3") {
      Recipe factors;
      factors.name = "rope_freqs.weight";
      factors.shape = {m_.head_dim / 2};
      factors.values = llama3_factors(m_.rope, m_.head_dim);
      out_.tensors.push_back(std::move(factors));
    }
    if (m_.arch() == Arch::llama && m_.window != 0 && to_ != World::hf)
      out_.notes.push_back("sliding_window " + std::to_string(m_.window) + ": " +
                           (to_ == World::gguf ? "llama.cpp" : "mlx-lm") + "'s " + m_.type->name +
                           " sees all tokens before, not the last of them only");
    for (const auto& [name, shape] : shapes_) {
      if (used_.contains(name)) continue;
      if (!may_be_left_out(name))
        return unsupported("tensor " + in_quotes(name) + " " + shape->str() + " is not one of a " +
                           m_.type->name + ", expected only those");
      out_.left_out.push_back(std::string(name));
    }
    return std::move(out_);
  }

 private:
  // Of transformers' names, which differ between text and vision models and over the years.
  std::pair<std::string, std::string> source_prefixes() const {
    for (const char* prefix : {"model.language_model.", "language_model.model."}) {
      if (!shapes_.contains(std::string(prefix) + "embed_tokens.weight")) continue;
      const bool inside = shapes_.contains("language_model.lm_head.weight");
      return {prefix, inside ? "language_model." : ""};
    }
    return {"model.", ""};
  }

  bool may_be_left_out(std::string_view name) const {
    const auto contains = [&](std::string_view what) { return name.find(what) != name.npos; };
    if (from_ == World::gguf) {
      if (name == "rope_freqs.weight") return true;
      if (!m_.gated_delta() || !name.starts_with("blk.")) return false;
      std::int64_t layer = -1;  // those that predict further tokens come after the model's
      std::from_chars(name.data() + 4, name.data() + name.size(), layer);
      return layer >= m_.layers;
    }
    if (name.ends_with("lm_head.weight")) return m_.tied;
    if (contains("rotary_emb.inv_freq")) return true;
    if (m_.gated_delta() && (name.starts_with("mtp.") || contains(".mtp."))) return true;
    return m_.in_vision && sees(name);
  }

  Status rename(const std::vector<Part>& source, const std::vector<Part>& target) {
    std::map<Q, Where> where;
    for (std::size_t p = 0; p < source.size(); ++p) BITTERN_TRY(place(source, p, where));
    for (const Part& part : target) {
      if (!part.written) continue;
      Recipe recipe;
      recipe.name = part.name;
      recipe.shape = part.shape;
      BITTERN_TRY(fill(source, where, part, recipe));
      out_.tensors.push_back(std::move(recipe));
    }
    return {};
  }

  // Notes where the rows of a part are that the source has.
  Status place(const std::vector<Part>& source, std::size_t p, std::map<Q, Where>& where) {
    const Part& part = source[p];
    const auto index = static_cast<std::int32_t>(p);
    const auto found = shapes_.find(part.name);
    if (found == shapes_.end()) return {};
    if (*found->second != part.shape)
      return invalid("tensor " + in_quotes(part.name) + " is " + found->second->str() +
                     ", expected " + part.shape.str() + " as the config says");
    used_.insert(found->first);
    std::int64_t row = 0;
    for (const Rows& run : part.rows) {
      Where& there = where[run.quantity];
      const auto twice = [&](std::int32_t other) {
        return invalid("tensors " + in_quotes(source[std::size_t(other)].name) + " and " +
                       in_quotes(part.name) + " hold the same weights, expected one of them");
      };
      if (there.whole >= 0) return twice(there.whole);
      if (part.whole) {
        if (!there.rows.empty()) return twice(there.rows.back().part);
        there.whole = index;
        break;
      }
      // Experts come in order: what is missing shows before room is made for those after it.
      if (part.rows.size() == 1 && run.first > std::int64_t(there.rows.size()))
        return missing(source, run.quantity, std::int64_t(there.rows.size()));
      const auto size = std::size_t(run.first + (run.count - 1) * run.step + 1);
      if (there.rows.size() < size) there.rows.resize(size);
      for (std::int64_t i = 0; i < run.count; ++i) {
        Place& at = there.rows[std::size_t(run.first + i * run.step)];
        if (at.part >= 0) return twice(at.part);
        at = {index, row++};
      }
    }
    return {};
  }

  static Status fill(const std::vector<Part>& source, const std::map<Q, Where>& where,
                     const Part& part, Recipe& recipe) {
    std::vector<std::int32_t> parts;  // behind recipe.sources
    std::size_t last = 0;             // rows of a part follow each other
    const auto source_of = [&](std::int32_t p) {
      if (last >= parts.size() || parts[last] != p)
        last = static_cast<std::size_t>(std::find(parts.begin(), parts.end(), p) - parts.begin());
      if (last == parts.size()) {
        parts.push_back(p);
        recipe.sources.push_back(source[std::size_t(p)].name);
      }
      return static_cast<std::uint32_t>(last);
    };
    for (Rows run : part.rows) {
      const auto found = where.find(run.quantity);
      if (found == where.end()) return missing(source, run.quantity, run.first);
      const Where& there = found->second;
      if (part.whole && there.whole >= 0) {
        source_of(there.whole);
        continue;
      }
      // Where one of the two is the quantity itself, the other tells how long its rows are.
      if (part.whole && there.rows.front().part >= 0) {
        recipe.width = source[std::size_t(there.rows.front().part)].width;
        run.count = part.shape.numel() / recipe.width;
      } else {
        recipe.width = part.width;
      }
      for (std::int64_t i = 0; i < run.count; ++i) {
        const Place at = there.at(run.first + i * run.step);
        if (at.part < 0) return missing(source, run.quantity, run.first + i * run.step);
        add_row(recipe.rows, source_of(at.part), at.row);
      }
    }
    const Part& first = source[std::size_t(parts.front())];
    if (parts.size() == 1 && recipe.rows.size() == 1 && recipe.rows[0].first == 0 &&
        recipe.rows[0].step == 1 && recipe.rows[0].count == first.shape.numel() / recipe.width) {
      recipe.rows.clear();
      recipe.width = 0;
    }
    recipe.map = between(first.map, part.map);
    recipe.column_block = std::max(part.column_block, first.column_block);
    recipe.columns = part.columns;
    if (!first.columns.empty()) {
      recipe.columns.resize(first.columns.size());
      for (std::size_t b = 0; b < first.columns.size(); ++b)
        recipe.columns[std::size_t(first.columns[b])] = static_cast<std::int64_t>(b);
    }
    return {};
  }

  // Runs as long as can be: a second row sets the step.
  static void add_row(std::vector<RowRun>& rows, std::uint32_t source, std::int64_t row) {
    if (!rows.empty() && rows.back().source == source) {
      RowRun& run = rows.back();
      if (run.count == 1 && row > run.first) {
        run.step = row - run.first;
        run.count = 2;
        return;
      }
      if (run.count > 1 && row == run.first + run.count * run.step) {
        ++run.count;
        return;
      }
    }
    rows.push_back({.source = source, .first = row, .count = 1, .step = 1});
  }

  const Model& m_;
  World from_, to_;
  std::map<std::string, const Shape*, std::less<>> shapes_;
  std::set<std::string_view> used_;
  Renaming out_;
};

// "135M", "8x7B": as llama.cpp's converter rounds.
std::string size_label(std::int64_t parameters, std::int64_t in_experts, std::int64_t experts) {
  double count = double(parameters);
  if (experts > 0) count += double(in_experts) / double(experts) - double(in_experts);
  const char* unit = "K";
  double scale = 1e-3;
  if (count > 1e12) {
    unit = "T", scale = 1e-12;
  } else if (count > 1e9) {
    unit = "B", scale = 1e-9;
  } else if (count > 1e6) {
    unit = "M", scale = 1e-6;
  }
  const double scaled = count * scale;
  const double rounded = std::nearbyint(scaled);
  const int digits = rounded >= 10 ? 0 : rounded >= 1 ? 1 : 2;
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%.*f%s", digits, scaled, unit);
  return (experts > 0 ? std::to_string(experts) + "x" : "") + text.data();
}

bool in_experts(std::string_view name) {
  return name.find(".experts.") != name.npos || name.find(".switch_mlp.") != name.npos;
}

}  // namespace

World world_of_folder(std::span<const NamedShape> tensors) {
  for (const NamedShape& tensor : tensors) {
    const std::string_view name = tensor.name;
    if (name.find(".switch_mlp.") != name.npos) return World::mlx;
    if (name.ends_with(".conv1d.weight") && tensor.shape.rank == 3)
      return tensor.shape[2] == 1 ? World::mlx : World::hf;
  }
  return World::hf;
}

Result<GgufMetadata> metadata_from_config(const Json& config, std::span<const NamedShape> tensors,
                                          std::string_view model_name) {
  const auto model = model_from_config(config);
  if (!model) return model.status();
  std::int64_t parameters = 0, expert_parameters = 0;
  for (const NamedShape& tensor : tensors) {
    if (sees(tensor.name)) continue;
    parameters += tensor.shape.numel();
    if (in_experts(tensor.name)) expert_parameters += tensor.shape.numel();
  }
  GgufMetadata out;
  out.emplace_back("general.architecture", GgufData(gguf_name(model->arch())));
  out.emplace_back("general.type", GgufData("model"));
  if (!model_name.empty()) out.emplace_back("general.name", GgufData(model_name));
  out.emplace_back(
      "general.size_label",
      GgufData(std::string_view(size_label(parameters, expert_parameters, model->experts))));
  BITTERN_TRY(add_metadata(*model, out));
  return out;
}

Result<Renaming> rename_tensors(const Json& config, std::span<const NamedShape> tensors, World from,
                                World to) {
  if (from == to) {
    Renaming same;
    for (const NamedShape& tensor : tensors) {
      Recipe& recipe = same.tensors.emplace_back();
      recipe.name = tensor.name;
      recipe.shape = tensor.shape;
      recipe.sources = {tensor.name};
    }
    return same;
  }
  const auto model = model_from_config(config);
  if (!model) return model.status();
  return Renamer(*model, tensors, from, to).run();
}

}  // namespace bittern
