// The gradients of causal softmax attention: of what aura_attention computes where all tokens are
// `first` ones. For query i and head h, with the keys and values of KV head h / (heads / kv_heads)
// and sums over the tokens t that the query sees:
//
//   out[i,h] = sum_t p_t v_t      p_t = exp(x_t - m) / l      l = sum_t exp(x_t - m)
//   x_t = scale * q[i,h] . k_t    or with a softcap > 0: softcap * tanh(that / softcap)
//
// Sequences are runs of the tokens (bittern/sequences.h); with sequences 0 there is one. They may
// be empty. Token i sees those of its sequence up to itself, and with a window w > 0 none that is w
// or more before it. Nothing of the forward pass is kept: all is computed anew.
//
// The order of operations, all in f32; exp and tanh as in core/math.h. Dots and sums over t are
// acc = fma(a, b, acc) from 0 with j or t ascending, but l is acc + e_t:
//
//   a    = q * scale              s_t = sum_j a_j k_tj
//   x_t  = s_t                    or with a softcap: u_t = tanh(s_t / softcap), x_t = softcap * u_t
//   m    the largest x_t that is not NaN, or -inf
//   e_t  = exp(x_t - m), or exp(x_t) where m = -inf
//   l    = sum_t e_t              r = 1 / l, or 0 where l = 0
//   g_t  = sum_j d_out_j v_tj     D = r * sum_t e_t g_t
//   p_t  = e_t * r
//   z_t  = p_t * (g_t - D)        or with a softcap: (that) * fma(-u_t, u_t, 1)
//
//   d_q_j  = scale * sum_t z_t k_tj
//   d_k_tj = sum of z_t a_j       over the heads of the group, and for each over the queries that
//   d_v_tj = sum of p_t d_out_j   see t, both ascending: one accumulator, from 0
//
// What a query does not see is not computed: a NaN in a row affects only the queries that see it,
// and what these see. A query whose logits are all -inf adds nothing.
#pragma once
#include <algorithm>

#include "bittern/sequences.h"

namespace bittern {

struct AttentionBackwardDesc {
  std::int64_t tokens = 0;
  std::int64_t sequences = 0;
  std::int64_t heads = 1;
  std::int64_t kv_heads = 1;
  std::int64_t dim = 128;
  double scale = 0;
  double softcap = 0;
  std::int64_t window = 0;
  bool operator==(const AttentionBackwardDesc&) const = default;

  std::int64_t group() const { return heads / kv_heads; }  // query heads of a KV head
  // How many tokens a query sees at most.
  std::int64_t reach() const { return window > 0 ? window : tokens; }
  Sequences rows() const { return {1, tokens, sequences}; }
  float softmax_scale() const noexcept;
  Axes query_shape() const { return {{"tokens", tokens}, {"heads", heads}, {"dim", dim}}; }
  Axes key_shape() const { return {{"tokens", tokens}, {"kv_heads", kv_heads}, {"dim", dim}}; }
};

struct AttentionBackward {
  static constexpr std::string_view kName = "attention_backward";
  static constexpr std::string_view kCategory = "layers";

  using Desc = AttentionBackwardDesc;
  struct Args {
    ConstView d_out;
    ConstView q, k, v;
    ConstView cu_seqlens{};
    MutView d_q, d_k, d_v;
  };

  static Status check(const Desc& d) noexcept;
  static Status check_contents(const Desc& d, const Args& a) {
    return check_cu_seqlens(kName, d.rows(), a.cu_seqlens);
  }
  static PrecisionGuarantee contract(const Desc&) { return exact_guarantee(DType::f32); }
  static DType element(const Desc&) { return DType::f32; }
  static DType aux_element(const Desc&) { return DType::f32; }
  // Five products over the pairs of a query and a token that it sees, for sequences of equal
  // length.
  static double flops(const Desc& d) {
    const auto count = static_cast<double>(d.rows().count());
    const double length = static_cast<double>(d.tokens) / count;
    const double reach = std::min(static_cast<double>(d.reach()), length);
    const double pairs = count * (reach * (reach + 1) / 2 + (length - reach) * reach);
    return 5 * 2.0 * static_cast<double>(d.dim * d.heads) * pairs;
  }
  static std::int64_t elements(const Desc& d) { return d.query_shape().numel(); }

  template <class D, class F>
  static void fields(D& d, F&& f) {
    f("tokens", d.tokens, "number of tokens of all sequences");
    f("sequences", d.sequences, "number of sequences packed in the tokens (0: one)");
    f("heads", d.heads, "number of query heads");
    f("kv_heads", d.kv_heads, "number of KV heads, a divisor of heads");
    f("dim", d.dim, "length of a head's row, 1..1024");
    f("scale", d.scale, "factor of the logits (0: 1 / sqrt(dim))");
    f("softcap", d.softcap, "bound of the logits: softcap * tanh(logit / softcap) (0: none)");
    f("window", d.window, "number of tokens that a query sees (0: all)");
  }
  template <class A, class F>
  static void operands(const Desc& d, A& a, F&& f) {
    const Operand queries{DType::f32, d.query_shape(), Operand::kStrided};
    const Operand keys{DType::f32, d.key_shape(), Operand::kStrided};
    f("d_out", a.d_out, queries);
    f("q", a.q, queries);
    f("k", a.k, keys);
    f("v", a.v, keys);
    f("cu_seqlens", a.cu_seqlens, d.rows().operand());
    f("d_q", a.d_q, queries);
    f("d_k", a.d_k, keys);
    f("d_v", a.d_v, keys);
  }
};

}  // namespace bittern
