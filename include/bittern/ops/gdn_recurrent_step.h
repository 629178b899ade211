// The gated delta rule token by token: decoding. For each sequence, value head and token in turn,
// with the state S [key_dim, value_dim] and the head's q, k, v (widened to f32):
//
//   q, k   = x * (1 / sqrt(x.x + 1e-6)) each, if qk_l2norm;  then q = q * query_scale()
//   a      = exp(g)                 g    = -exp(a_log) * softplus(g + dt_bias), if gate
//   b      = beta                   beta = sigmoid(beta), if beta_sigmoid;  2 * that, if
//                                          allow_neg_eigval
//   sk_j   = sum_i S_ij k_i         sq_j = sum_i S_ij q_i
//   d_j    = b * fma(-a, sk_j, v_j)
//   o_j    = fma(k.q, d_j, a * sq_j)              rounded to the element's dtype
//   S_ij   = fma(k_i, d_j, a * S_ij)
//
// which is S' = a S, d = b (v - S'^T k), S = S' + k d^T, o = S^T q, with the state read once and
// written once. Everything is f32; each operation written above rounds once, products of three from
// the left. exp, softplus and sigmoid are core/math.h's. x.x and k.q are summed as core/dot.h says.
// sk and sq depend on state_layout:
//
//   key_value   sum = fma(S_ij, k_i, sum), i ascending, from 0
//   value_key   as core/dot.h: 16 strided sums, then the halving tree
//
// NaN and infinities follow from this arithmetic; those of a sequence never reach another.
//
// States. With pool = 0 sequence s has state s. With pool = P > 0 there are P states and sequence s
// uses state state_index[s]; the indices must be in range and different. The other states are not
// changed. An index of -1 skips its sequence, for servers that pad their batches: its o and
// snapshots are zeros, and nothing of it is read. On CUDA the host does not read state_index. Any
// other index that is out of range then leaves its sequence out: its o and snapshots are not
// written. If two sequences have the same index, their results and that state are not specified.
// snapshots, if given, receives the state after each token, to return to it when later tokens are
// rejected.
#pragma once
#include "bittern/gdn_desc.h"

namespace bittern {

struct GdnRecurrentStep {
  static constexpr std::string_view kName = "gdn_recurrent_step";
  static constexpr std::string_view kCategory = "gated_delta";

  using Desc = GdnStepDesc;
  struct Args {
    ConstView q, k, v, g, beta;
    ConstView a_log{}, dt_bias{};  // with `gate`
    ConstView state_index{};       // with a pool
    MutView state, o;
    MutView snapshots{};
  };

  static Status check(const Desc& d) { return check_gdn_step_desc(kName, d); }
  static Status check_contents(const Desc& d, const Args& a) {
    return check_state_index(kName, d, a.state_index);
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
    f("tokens", d.tokens, "tokens per sequence");
    f("key_heads", d.key_heads, "number of heads of q and k");
    f("value_heads", d.value_heads, "number of heads of v, g and beta, a multiple of key_heads");
    f("key_dim", d.key_dim, "length of a key, 1..256");
    f("value_dim", d.value_dim, "length of a value, 1..256");
    f("pool", d.pool, "number of states that state_index chooses from (0: one per sequence)");
    f("element", d.element, "dtype of q, k, v and o: f32 f16 bf16");
    f("head_map", d.head_map,
      "key head of value head h: h / (value_heads / key_heads) or h % key_heads");
    f("state_layout", d.state_layout, "order of a state's two axes");
    f("qk_l2norm", d.qk_l2norm, "normalise q and k by their L2 norm first");
    f("gate", d.gate, "use -exp(a_log) * softplus(g + dt_bias) for g");
    f("beta_sigmoid", d.beta_sigmoid, "use sigmoid(beta) for beta");
    f("allow_neg_eigval", d.allow_neg_eigval, "use 2 * sigmoid(beta) for beta");
    f("scale", d.scale, "factor of q (0: key_dim ^ -0.5)");
  }
  template <class A, class F>
  static void operands(const Desc& d, A& a, F&& f) {
    const GdnDesc h = d.heads();
    f("q", a.q, Operand{d.element, h.key_shape(), Operand::kStrided});
    f("k", a.k, Operand{d.element, h.key_shape(), Operand::kStrided});
    f("v", a.v, Operand{d.element, h.value_shape(), Operand::kStrided});
    f("g", a.g, Operand{DType::f32, h.gate_shape(), Operand::kScattered});
    f("beta", a.beta, Operand{DType::f32, h.gate_shape(), Operand::kScattered});
    f("a_log", a.a_log, h.gate_operand());
    f("dt_bias", a.dt_bias, h.gate_operand());
    f("state_index", a.state_index, d.index_operand());
    f("state", a.state, d.state_operand());
    f("o", a.o, Operand{d.element, h.value_shape(), Operand::kStrided});
    f("snapshots", a.snapshots, d.snapshot_operand());
  }
};

}  // namespace bittern
