// The problem the gated delta rule's ops share (docs/gated_delta.md has the equations).
//
//   q, k      [batch, tokens, key_heads, key_dim]
//   v, o      [batch, tokens, value_heads, value_dim]
//   g, beta   [batch, tokens, value_heads]            f32
//   A, L      [batch, tokens, value_heads, chunk]     row t: row (t - start) % chunk of its chunk
//   w         [batch, tokens, value_heads, key_dim]   u, v_new: [.., value_dim]
//   state     [sequence_count(), value_heads, key_dim, value_dim], or value_dim before key_dim f32
//   h         [batch, state_chunks(), value_heads, ...state]   the state before each chunk
//
// batch, tokens and sequences: bittern/sequences.h.
//
// Heads. value_heads is a multiple of key_heads; value head h uses key head
// h / (value_heads / key_heads) (grouped) or h % key_heads (tiled, as GGUF files of Qwen3.5 do).
#pragma once
#include <cmath>
#include <cstdint>
#include <string_view>
#include <utility>

#include "bittern/sequences.h"

namespace bittern {

enum class HeadMap : std::int32_t { grouped, tiled };
inline constexpr std::string_view kHeadMapNames[] = {"grouped", "tiled"};
constexpr auto& enum_names(HeadMap) { return kHeadMapNames; }

enum class StateLayout : std::int32_t { key_value, value_key };
inline constexpr std::string_view kStateLayoutNames[] = {"key_value", "value_key"};
constexpr auto& enum_names(StateLayout) { return kStateLayoutNames; }

struct GdnDesc {
  std::int64_t batch = 1;
  std::int64_t tokens = 0;
  std::int64_t key_heads = 1;
  std::int64_t value_heads = 1;
  std::int64_t key_dim = 128;    // 1..256
  std::int64_t value_dim = 128;  // 1..256
  std::int32_t chunk = 64;       // 16, 32 or 64
  std::int64_t sequences = 0;
  DType element = DType::f32;    // of q, k, v, o, w, u, h: f32 f16 bf16
  DType a_element = DType::f32;  // of A: f32 bf16
  HeadMap head_map = HeadMap::grouped;
  StateLayout state_layout = StateLayout::key_value;
  bool lower_triangular = false;  // A is: it is not read above its diagonal
  bool qk_l2norm = false;         // q and k are normalised first: x / sqrt(sum x^2 + 1e-6)
  bool gate = false;              // g holds a: the log decay is -exp(a_log) * softplus(a + dt_bias)
  bool beta_sigmoid = false;      // beta holds b: the strength is sigmoid(b)
  bool allow_neg_eigval = false;  // with beta_sigmoid: 2 * sigmoid(b)
  double scale = 0;               // of q; 0: key_dim ^ -0.5
  bool operator==(const GdnDesc&) const = default;

  Sequences rows() const { return {batch, tokens, sequences, chunk}; }
  std::int64_t sequence_count() const { return rows().count(); }
  std::int64_t key_head(std::int64_t value_head) const {
    return head_map == HeadMap::grouped ? value_head / (value_heads / key_heads)
                                        : value_head % key_heads;
  }
  // The i-th of the value heads that use a key head.
  std::int64_t value_head(std::int64_t key_head, std::int64_t i) const {
    return head_map == HeadMap::grouped ? key_head * (value_heads / key_heads) + i
                                        : key_head + i * key_heads;
  }
  std::int64_t chunks(std::int64_t length) const { return rows().chunks(length); }
  // The number of chunks in h per batch row. The chunks of the sequences follow one another; chunks
  // of h after the last are not written.
  std::int64_t state_chunks() const { return rows().most_chunks(); }
  // Rounded to f32 once.
  float query_scale() const {
    return static_cast<float>(scale != 0 ? scale : 1 / std::sqrt(static_cast<double>(key_dim)));
  }

  Axes key_shape() const { return of_tokens({"key_heads", key_heads}, {"key_dim", key_dim}); }
  Axes value_shape() const { return of_tokens(value_head_axis(), {"value_dim", value_dim}); }
  Axes gate_shape() const { return {{"batch", batch}, {"tokens", tokens}, value_head_axis()}; }
  Axes matrix_shape() const { return of_tokens(value_head_axis(), {"chunk", chunk}); }
  Axes w_shape() const { return of_tokens(value_head_axis(), {"key_dim", key_dim}); }
  Axes mask_shape() const { return {{"batch", batch}, {"tokens", tokens}}; }
  Axes head_shape() const { return {value_head_axis()}; }
  Axes state_shape() const {
    const auto [first, second] = state_axes();
    return {rows().axis(), value_head_axis(), first, second};
  }
  Axes chunk_state_shape() const {
    const auto [first, second] = state_axes();
    return {{"batch", batch}, {"chunks", state_chunks()}, value_head_axis(), first, second};
  }
  // A state's own, in their order.
  std::pair<Axis, Axis> state_axes() const {
    const Axis key{"key_dim", key_dim}, value{"value_dim", value_dim};
    return state_layout == StateLayout::key_value ? std::pair(key, value) : std::pair(value, key);
  }
  Axis value_head_axis() const { return {"value_heads", value_heads}; }
  Axes of_tokens(Axis heads, Axis elements) const {
    return {{"batch", batch}, {"tokens", tokens}, heads, elements};
  }
  // initial_state, final_state and their gradients.
  Operand state_operand() const {
    return {DType::f32, state_shape(), Operand::kOptional | Operand::kStrided};
  }
  Operand sequence_operand() const { return rows().operand(); }
  // a_log and dt_bias.
  Operand gate_operand() const { return Operand::read_if(gate, DType::f32, head_shape(), "gate"); }
};

// The problem of the ops that go token by token, with states that are read and written.
struct GdnStepDesc {
  std::int64_t batch = 0;  // sequences
  std::int64_t tokens = 1;
  std::int64_t key_heads = 1;
  std::int64_t value_heads = 1;
  std::int64_t key_dim = 128;    // 1..256
  std::int64_t value_dim = 128;  // 1..256
  std::int64_t pool = 0;
  DType element = DType::f32;  // of q, k, v, o: f32 f16 bf16
  HeadMap head_map = HeadMap::grouped;
  StateLayout state_layout = StateLayout::key_value;
  bool qk_l2norm = false;
  bool gate = false;
  bool beta_sigmoid = false;
  bool allow_neg_eigval = false;
  double scale = 0;  // of q; 0: key_dim ^ -0.5
  bool operator==(const GdnStepDesc&) const = default;

  // The same heads as the chunk form has.
  GdnDesc heads() const {
    return {.batch = batch,
            .tokens = tokens,
            .key_heads = key_heads,
            .value_heads = value_heads,
            .key_dim = key_dim,
            .value_dim = value_dim,
            .element = element,
            .head_map = head_map,
            .state_layout = state_layout,
            .qk_l2norm = qk_l2norm,
            .gate = gate,
            .beta_sigmoid = beta_sigmoid,
            .allow_neg_eigval = allow_neg_eigval,
            .scale = scale};
  }
  std::int64_t states() const { return pool > 0 ? pool : batch; }
  Axis state_axis() const { return {pool > 0 ? "pool" : "batch", states()}; }
  Axes state_shape() const {
    const auto [first, second] = heads().state_axes();
    return {state_axis(), heads().value_head_axis(), first, second};
  }
  Axes snapshot_shape() const {
    const auto [first, second] = heads().state_axes();
    return {{"batch", batch}, {"tokens", tokens}, heads().value_head_axis(), first, second};
  }
  Operand index_operand() const {
    return Operand::read_if(pool > 0, DType::s32, {{"batch", pool > 0 ? batch : 0}}, "pool");
  }
  Operand state_operand() const {
    return {DType::f32, state_shape(), Operand::kInOut | Operand::kStrided};
  }
  Operand snapshot_operand() const {
    return {DType::f32, snapshot_shape(), Operand::kOptional | Operand::kExtra};
  }
};

// Which fields an op reads beyond batch, tokens, value_heads, chunk and sequences.
struct GdnFields {
  bool keys = false;      // key_heads, key_dim, head_map, element
  bool values = false;    // value_dim, element
  bool matrix = false;    // a_element
  bool triangle = false;  // lower_triangular
  bool state = false;     // state_layout
  bool scale = false;
  bool gate = false;   // gate
  bool fused = false;  // qk_l2norm, beta_sigmoid, allow_neg_eigval
};

Status check_gdn_desc(std::string_view op, const GdnDesc& d) noexcept;
Status check_gdn_step_desc(std::string_view op, const GdnStepDesc& d) noexcept;
// Of states picked from a pool: in range or -1, and different.
Status check_state_index(std::string_view op, const GdnStepDesc& d,
                         const ConstView& index) noexcept;

template <GdnFields kFields, class D, class F>
void visit_gdn_fields(D& d, F&& f) {
  f("batch", d.batch, "rows of tokens; 1 with sequences");
  f("tokens", d.tokens, "tokens per row");
  if constexpr (kFields.keys) f("key_heads", d.key_heads, "number of heads of q and k");
  f("value_heads", d.value_heads, "number of heads of v, g and beta, a multiple of key_heads");
  if constexpr (kFields.keys) f("key_dim", d.key_dim, "length of a key, 1..256");
  if constexpr (kFields.values) f("value_dim", d.value_dim, "length of a value, 1..256");
  f("chunk", d.chunk, "tokens per chunk: 16, 32 or 64");
  f("sequences", d.sequences, "number of sequences packed in the tokens (0: each row is one)");
  if constexpr (kFields.keys || kFields.values)
    f("element", d.element, "dtype of keys and values: f32 f16 bf16");
  if constexpr (kFields.matrix) f("a_element", d.a_element, "dtype of A: f32 bf16");
  if constexpr (kFields.keys)
    f("head_map", d.head_map,
      "key head of value head h: h / (value_heads / key_heads) or h % key_heads");
  if constexpr (kFields.state) f("state_layout", d.state_layout, "order of a state's two axes");
  if constexpr (kFields.triangle)
    f("lower_triangular", d.lower_triangular, "do not read A above its diagonal");
  if constexpr (kFields.fused)
    f("qk_l2norm", d.qk_l2norm, "normalise q and k by their L2 norm first");
  if constexpr (kFields.gate) f("gate", d.gate, "use -exp(a_log) * softplus(g + dt_bias) for g");
  if constexpr (kFields.fused) {
    f("beta_sigmoid", d.beta_sigmoid, "use sigmoid(beta) for beta");
    f("allow_neg_eigval", d.allow_neg_eigval, "use 2 * sigmoid(beta) for beta");
  }
  if constexpr (kFields.scale) f("scale", d.scale, "factor of q (0: key_dim ^ -0.5)");
}

}  // namespace bittern
