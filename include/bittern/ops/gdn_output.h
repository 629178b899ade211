// The gated delta rule's output of each chunk, from the state before it and what it writes:
//
//   p[i][j] = X((q[i] . k[j]) * e^(g[i] - g[j]))      j <= i
//   o[i]    = X(scale * (e^g[i] * (q[i] h) + sum over j <= i of p[i][j] * v_new[j]))
//
// for rows i, j of one chunk, h [key_dim, value_dim] its state (gdn_state), g summed from its start
// (gdn_cumsum). X rounds to `element`, nearest even. Matrix products are acc = fma(a, b, acc) in
// f32, terms ascending: q . k and q h from 0, the sum over j from e^g[i] * (q[i] h). Every other
// operation is rounded once to f32; exp is core/math.h's, within 1 ulp, and is taken of differences
// with j <= i alone. scale is query_scale().
//
// Kernel cuda_wgmma (Preference::fastest, sm_90, f16 and bf16, key_dim 64 or 128, value_dim a
// multiple of 64, chunk 64) adds the same terms in another order, and tensor cores truncate where
// fma rounds. Its exponentials are within 2^-16 of themselves. p is rounded as above. Its ErrorNorm
// is `terms`: an element of o is off by an ulp of `element` and at most error_bound = r + 2^-13,
// where r is 2^-8 for bf16 and 2^-11 for f16, times
//
//   |scale| (e^g[i] (|q[i]| . |h|) + sum over j <= i of (|q[i]| . |k[j]|) e^(g[i] - g[j])
//   |v_new[j]|)
//
// in which each dot product, exponential and product of both counts as at least 2^-80 (2^-13 for
// f16) if it is above 0, and each |v_new| too. With a term that is not finite, the element is NaN
// or an infinity as in the definition. But if an exponential or one of these magnitudes reaches
// 2^126 (for f16 2^14), nothing is promised for that element.
#pragma once
#include "bittern/gdn_desc.h"

namespace bittern {

struct GdnOutput {
  static constexpr std::string_view kName = "gdn_output";
  static constexpr std::string_view kCategory = "gated_delta";
  static constexpr bool kBounded = true;  // has kernels with a bound: see Judge in oracle.h
  static constexpr GdnFields kFields{.keys = true, .values = true, .state = true, .scale = true};

  using Desc = GdnDesc;
  struct Args {
    ConstView q, k, v_new, h, g;
    ConstView cu_seqlens{};
    MutView o;
  };

  static Status check(const Desc& d) { return check_gdn_desc(kName, d); }
  static Status check_contents(const Desc& d, const Args& a) {
    return check_cu_seqlens(kName, d.rows(), a.cu_seqlens);
  }
  static PrecisionGuarantee contract(const Desc& d) { return exact_guarantee(d.element); }
  static DType element(const Desc& d) { return d.element; }
  static DType aux_element(const Desc& d) { return d.a_element; }
  // Of the whole square of each chunk.
  static double flops(const Desc& d) {
    const auto k = static_cast<double>(d.key_dim), v = static_cast<double>(d.value_dim);
    return 2.0 * static_cast<double>(d.gate_shape().numel()) * (k * v + d.chunk * (k + v));
  }
  static std::int64_t elements(const Desc& d) { return d.gate_shape().numel(); }

  template <class D, class F>
  static void fields(D& d, F&& f) {
    visit_gdn_fields<kFields>(d, f);
  }
  template <class A, class F>
  static void operands(const Desc& d, A& a, F&& f) {
    f("q", a.q, Operand{d.element, d.key_shape()});
    f("k", a.k, Operand{d.element, d.key_shape()});
    f("v_new", a.v_new, Operand{d.element, d.value_shape()});
    f("h", a.h, Operand{d.element, d.chunk_state_shape()});
    f("g", a.g, Operand{DType::f32, d.gate_shape()});
    f("cu_seqlens", a.cu_seqlens, d.sequence_operand());
    f("o", a.o, Operand{d.element, d.value_shape()});
  }
};

}  // namespace bittern
