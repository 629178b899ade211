// The gated delta rule's state from chunk to chunk, and the values each chunk writes into it. For a
// sequence and head, with S [key_dim, value_dim] in f32, at first initial_state, or 0 if left out:
//
//   for each chunk n:   h[n] = X(S)
//                       y[i] = u[i] - w[i] X(S)              v_new[i] = X(y[i])
//                       z[i] = X(y[i] * e^(g[last] - g[i]))
//                       S    = e^g[last] * S + (sum over i of k[i]^T z[i])
//   final_state = S
//
// for rows i of the chunk, `last` its last one, g summed from its start (gdn_cumsum), w and u from
// gdn_recompute_w_u. X rounds to `element`, nearest even. Matrix products are acc = fma(a, b, acc)
// in f32, terms ascending: w X(S) from 0, the sum over i from the product e^g[last] * S. Every
// other operation is rounded once to f32; exp is core/math.h's, within 1 ulp. h lies as the state
// does (state_layout). An empty sequence passes its state on. Any output may be left out.
//
// Kernel cuda_wgmma (Preference::fastest, sm_90, f16 and bf16, key_dim 64 or 128, value_dim a
// multiple of 64, chunk 64) rounds where the definition does, but adds in another order, and tensor
// cores truncate where fma rounds. Its exponentials are within 2^-16 of themselves. So S differs,
// and X(S) and z now and then by an ulp, which goes on to later chunks. Its ErrorNorm is `terms`,
// and error_bound is b = r + 2^-11, where r is 2^-8 for bf16 and 2^-11 for f16. For a chunk of one
// head let E be the diagonal matrix of e^(g[last] - g[i]), |X| the magnitudes of X, and
//
//   F_c     what a change of S at the end of an earlier chunk c has become before this chunk: I;
//           every chunk in between makes e^g[last] F_c - k^T E w F_c of it
//   D       = the sum over c of |F_c| N_c;                  S' = |S| + b D
//   R       = |w| S' + |u| / 64
//   Y       = R + the sum over c of |w F_c| N_c;            y' = |y| + b Y
//   N       = |k|^T E (y' + R) + e^g[last] S' / 64, the N_c of this chunk
//
// Then h is off by at most b D and an ulp of `element`, v_new by b Y and an ulp, final_state by b D
// after the last chunk. Each factor above 0 counts as at least 2^-80 (2^-13 for f16) in these sums,
// and each sum as as much more. If an input is not finite, or one of these magnitudes or an
// exponential reaches 2^126 (for f16 2^14), nothing is promised for that chunk and head, and for
// what follows in the sequence.
#pragma once
#include "bittern/gdn_desc.h"

namespace bittern {

struct GdnState {
  static constexpr std::string_view kName = "gdn_state";
  static constexpr std::string_view kCategory = "gated_delta";
  static constexpr bool kBounded = true;  // has kernels with a bound: see Judge in oracle.h
  static constexpr GdnFields kFields{.keys = true, .values = true, .state = true};

  using Desc = GdnDesc;
  struct Args {
    ConstView k, w, u, g;
    ConstView initial_state{}, cu_seqlens{};
    MutView h{}, v_new{}, final_state{};
  };

  static Status check(const Desc& d) { return check_gdn_desc(kName, d); }
  static Status check_contents(const Desc& d, const Args& a) {
    return check_cu_seqlens(kName, d.rows(), a.cu_seqlens);
  }
  static PrecisionGuarantee contract(const Desc& d) { return exact_guarantee(d.element); }
  static DType element(const Desc& d) { return d.element; }
  static DType aux_element(const Desc& d) { return d.a_element; }
  static double flops(const Desc& d) {
    return 4.0 * static_cast<double>(d.value_shape().numel()) * static_cast<double>(d.key_dim);
  }
  static std::int64_t elements(const Desc& d) { return d.gate_shape().numel(); }

  template <class D, class F>
  static void fields(D& d, F&& f) {
    visit_gdn_fields<kFields>(d, f);
  }
  template <class A, class F>
  static void operands(const Desc& d, A& a, F&& f) {
    f("k", a.k, Operand{d.element, d.key_shape()});
    f("w", a.w, Operand{d.element, d.w_shape()});
    f("u", a.u, Operand{d.element, d.value_shape()});
    f("g", a.g, Operand{DType::f32, d.gate_shape()});
    f("initial_state", a.initial_state, Operand{DType::f32, d.state_shape(), Operand::kOptional});
    f("cu_seqlens", a.cu_seqlens, d.sequence_operand());
    f("h", a.h, Operand{d.element, d.chunk_state_shape(), Operand::kOptional});
    f("v_new", a.v_new, Operand{d.element, d.value_shape(), Operand::kOptional});
    f("final_state", a.final_state, Operand{DType::f32, d.state_shape(), Operand::kOptional});
  }
};

}  // namespace bittern
