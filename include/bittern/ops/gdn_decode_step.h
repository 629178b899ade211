// A gated-delta layer's step while decoding, all that lies between its projections: for each
// sequence, and token by token,
//
//   q | k | v = silu(conv(x))           causal_conv1d, with conv_weight, conv_bias, and conv_state
//                                       as the inputs before x
//   o         = delta rule of q, k, v   gdn_recurrent_step with qk_l2norm, gate and beta_sigmoid:
//                                       g and beta hold the projections a and b
//   y         = gated norm of o, z      gated_rms_norm with norm_weight, for each value head
//
// The bits are those of the three ops one after the other: q, k, v and o are rounded to `element`.
// The channels of x are the heads of q, those of k, then those of v, each head's elements together.
//
// States. conv_state holds each sequence's last width - 1 inputs of the convolution, oldest first,
// and state that of the delta rule; both are read and written. pool, state_index and an index of -1
// are those of gdn_recurrent_step, for both states: a sequence that is skipped gives zeros in y and
// in the snapshots. On CUDA an index that is out of range leaves its sequence out. snapshots and
// conv_snapshots, if given, receive the states after each token, to return to them when later
// tokens are rejected.
#pragma once
#include "bittern/gdn_desc.h"
#include "bittern/norm_rounding.h"

namespace bittern {

struct GdnDecodeDesc {
  std::int64_t batch = 0;   // sequences
  std::int64_t tokens = 1;  // 0..8
  std::int64_t key_heads = 1;
  std::int64_t value_heads = 1;
  std::int64_t key_dim = 128;    // 1..256
  std::int64_t value_dim = 128;  // 1..256
  std::int32_t width = 4;        // 2..4
  std::int64_t pool = 0;
  DType element = DType::f32;  // of all but a_log, dt_bias and state: f32 f16 bf16
  HeadMap head_map = HeadMap::grouped;
  StateLayout state_layout = StateLayout::key_value;
  bool allow_neg_eigval = false;
  double eps = 1e-6;
  NormRounding rounding = NormRounding::once;
  bool operator==(const GdnDecodeDesc&) const = default;

  // The delta rule's part.
  GdnStepDesc step() const {
    return {.batch = batch,
            .tokens = tokens,
            .key_heads = key_heads,
            .value_heads = value_heads,
            .key_dim = key_dim,
            .value_dim = value_dim,
            .pool = pool,
            .element = element,
            .head_map = head_map,
            .state_layout = state_layout,
            .qk_l2norm = true,
            .gate = true,
            .beta_sigmoid = true,
            .allow_neg_eigval = allow_neg_eigval};
  }
  // The first channels of a head's q, k and v, and how many there are in all.
  std::int64_t q_channel(std::int64_t key_head) const { return key_head * key_dim; }
  std::int64_t k_channel(std::int64_t key_head) const { return (key_heads + key_head) * key_dim; }
  std::int64_t v_channel(std::int64_t head) const {
    return 2 * key_heads * key_dim + head * value_dim;
  }
  std::int64_t channels() const { return v_channel(value_heads); }
  Axis channel_axis() const { return {"key_heads*key_dim*2+value_heads*value_dim", channels()}; }
  Axes x_shape() const { return {{"batch", batch}, {"tokens", tokens}, channel_axis()}; }
  Axes conv_state_shape() const {
    return {step().state_axis(), channel_axis(), {"width-1", width - 1}};
  }
  Axes conv_snapshot_shape() const {
    return {{"batch", batch}, {"tokens", tokens}, channel_axis(), {"width-1", width - 1}};
  }
};

struct GdnDecodeStep {
  static constexpr std::string_view kName = "gdn_decode_step";
  static constexpr std::string_view kCategory = "gated_delta";
  static constexpr std::int64_t kMostTokens = 8;

  using Desc = GdnDecodeDesc;
  struct Args {
    ConstView x, z, g, beta, conv_weight, norm_weight, a_log, dt_bias;
    ConstView conv_bias{};
    ConstView state_index{};  // with a pool
    MutView conv_state, state, y;
    MutView snapshots{}, conv_snapshots{};
  };

  static Status check(const Desc& d) noexcept;
  static Status check_contents(const Desc& d, const Args& a) {
    return check_state_index(kName, d.step(), a.state_index);
  }
  static PrecisionGuarantee contract(const Desc& d) { return exact_guarantee(d.element); }
  static DType element(const Desc& d) { return d.element; }
  static DType aux_element(const Desc&) { return DType::f32; }
  static std::int64_t elements(const Desc& d) {
    return d.batch * d.value_heads * d.key_dim * d.value_dim;
  }

  template <class D, class F>
  static void fields(D& d, F&& f) {
    f("batch", d.batch, "number of sequences");
    f("tokens", d.tokens, "tokens per sequence, 0..8");
    f("key_heads", d.key_heads, "number of heads of q and k");
    f("value_heads", d.value_heads, "number of heads of v, g and beta, a multiple of key_heads");
    f("key_dim", d.key_dim, "length of a key, 1..256");
    f("value_dim", d.value_dim, "length of a value, 1..256");
    f("width", d.width, "inputs of the convolution per output, 2..4");
    f("pool", d.pool, "number of states that state_index chooses from (0: one per sequence)");
    f("element", d.element, "dtype of x, z, g, beta, weights, conv_state and y: f32 f16 bf16");
    f("head_map", d.head_map,
      "key head of value head h: h / (value_heads / key_heads) or h % key_heads");
    f("state_layout", d.state_layout, "order of a state's two axes");
    f("allow_neg_eigval", d.allow_neg_eigval, "use 2 * sigmoid(beta) for beta");
    f("eps", d.eps, "added to the mean square of o");
    f("rounding", d.rounding, "round y once, or after each of norm, weight and gate");
  }
  template <class A, class F>
  static void operands(const Desc& d, A& a, F&& f) {
    const GdnStepDesc step = d.step();
    const GdnDesc h = step.heads();
    f("x", a.x, Operand{d.element, d.x_shape(), Operand::kStrided});
    f("z", a.z, Operand{d.element, h.value_shape(), Operand::kStrided});
    f("g", a.g, Operand{d.element, h.gate_shape(), Operand::kScattered});
    f("beta", a.beta, Operand{d.element, h.gate_shape(), Operand::kScattered});
    f("conv_weight", a.conv_weight, Operand{d.element, {d.channel_axis(), {"width", d.width}}});
    f("norm_weight", a.norm_weight, Operand{d.element, {{"value_dim", d.value_dim}}});
    f("a_log", a.a_log, h.gate_operand());
    f("dt_bias", a.dt_bias, h.gate_operand());
    f("conv_bias", a.conv_bias, Operand{d.element, {d.channel_axis()}, Operand::kOptional});
    f("state_index", a.state_index, step.index_operand());
    f("conv_state", a.conv_state,
      Operand{d.element, d.conv_state_shape(), Operand::kInOut | Operand::kScattered});
    f("state", a.state, step.state_operand());
    f("y", a.y, Operand{d.element, h.value_shape(), Operand::kStrided});
    f("snapshots", a.snapshots, step.snapshot_operand());
    f("conv_snapshots", a.conv_snapshots,
      Operand{d.element, d.conv_snapshot_shape(), Operand::kOptional | Operand::kExtra});
  }
};

}  // namespace bittern
