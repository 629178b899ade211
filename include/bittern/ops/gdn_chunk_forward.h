// The gated delta rule over whole sequences, chunk by chunk, in one call. Token by token it is
//
//   S = e^g[t] S;   S = S + k[t]^T (beta[t] (v[t] - k[t] S));   o[t] = scale q[t] S
//
// with S [key_dim, value_dim] at first initial_state, or 0 if left out, and at last final_state. It
// is computed so: for each sequence, head and chunk, with rows i, j of the chunk,
//
//   q, k    = x * (1 / sqrt(x.x + 1e-6)) each, if qk_l2norm (x.x as core/dot.h);  q = q * scale
//   g       = -exp(a_log) * softplus(g + dt_bias), if gate
//   beta    = sigmoid(beta), if beta_sigmoid;  2 * that, if allow_neg_eigval
//   G[i]    = G[i-1] + max(g[i], -2^13) in f64, kept as hi + lo: hi the nearest multiple of 1/16,
//             ties to even, lo the rest, in f32
//   e^(G[i] - G[j]) = exp(hi[i] - hi[j], lo[i] - lo[j]);  e^G[i] the same with 0 for G[j]
//   L[i][j] = (beta[i] * (k[i] . k[j])) * e^(G[i] - G[j])        j < i
//   P[i][j] = (q[i] . k[j]) * e^(G[i] - G[j])                    j <= i
//   y[i]    = beta[i] * fma(-e^G[i], k[i] S, v[i]) - (sum over j < i of L[i][j] y[j])
//   o[i]    = X(e^G[i] * (q[i] S) + sum over j <= i of P[i][j] y[j])
//   S       = e^G[last] * S + sum over i of k[i]^T (e^(G[last] - G[i]) * y[i])
//
// All else in f32, whatever `element` is: X, the rounding of o to `element`, is the only one to a
// half type. Sums of products are acc = fma(a, b, acc), terms ascending: k.k, q.k, k S, q S and the
// sum in y from 0 (the latter is then subtracted), the sum in o from e^G[i] * (q[i] S), that in S
// from e^G[last] * S. Every other operation is rounded once; exp, softplus, sigmoid: core/math.h.
// y is what the chain of gdn_cumsum .. gdn_output calls v_new, by substitution, not by an inverse.
//
// e^(G[i] - G[j]) is within 2e-7 of e^(g[j+1] + .. + g[i]), relative, whatever the other g are, and
// at most 1 while no g is above 0. g <= -2^13, so also -infinity, is a reset: what is before it
// counts for 0 after it. A NaN, or an infinity elsewhere, reaches the later tokens of its sequence
// and head alone. A token whose `mask` is 0 is not looked at: q = k = v = 0, g = beta = 0, so the
// state passes it by, and its o is 0. An empty sequence passes its state on.
//
// Kernel cpu_bf16 (element bf16, Preference::fastest, a CPU with AVX512_BF16) keeps S and y in f32,
// and solves for y in f32. It rounds to bf16, nearest even: S in k S and q S; P and y in the sum of
// o, save where j is among the last rows before i (at most 8); e^(G[last] - G[i]) * y[i] in S. k
// and q enter products as they are, and the results are multiplied by scale and norms. Products
// take subnormal numbers for 0. Its ErrorNorm is `terms`, and error_bound is b = 2^-7 + 2^-12. For
// a chunk of one head let E, W and B be diagonal matrices of e^G[i], e^(G[last] - G[i]) and beta[i]
// e^G[i], K and Q its keys and queries, T = (I + L)^-1, |X| the magnitudes of X, and
//
//   A[i][j] = |beta[i]| (|k[i]| . |k[j]|) e^(G[i] - G[j]), j < i
//   C[i][j] = (|q[i]| . |k[j]|) e^(G[i] - G[j]), j <= i
//   F_c     what a change of S at the end of an earlier chunk c has become before this chunk: I;
//           every chunk in between makes e^G[last] F_c - K^T W T B K F_c of it
//   D       = the sum over c of |F_c| N_c;                      S' = |S| + b D
//   R       = |beta| |v| / 64 + |B| |K| S' / 2 + A y' / 64
//   Y       = |T| R + the sum over c of |T B K F_c| N_c;        y' = |y| + b Y
//   N       = |K|^T W y' / 2 + e^G[last] S' / 64 + |K^T W T| R, the N_c of this chunk
//   O       = E |Q| S' / 2 + (|P| + C / 64) y' + |P T| R
//             + the sum over c of |(E Q - P T B K) F_c| N_c
//
// Then y is off by at most b Y, o by b O and an ulp of `element`, and S, also as final_state, by
// b D. So errors go on as the rule itself takes them on: a decay, or a key that is seen again,
// removes them. Each factor above 0 counts as at least 2^-80 in these sums, and each sum as 2^-80
// more. A NaN goes where the definition takes it. If an input is infinite (other than
// g = -infinity), or if one of these magnitudes reaches 2^126, also with k and q as they are before
// qk_l2norm and scale, nothing is promised for that chunk and head and for what follows in the
// sequence.
//
// Kernel cuda_wgmma (Preference::fastest, sm_90, element bf16 or f16, key_dim 64 or 128, value_dim
// a multiple of 64, chunk 64) keeps S and all sums in f32 too. It rounds to `element`: S in k S and
// q S; the right side of y, beta[i] * fma(-e^G[i], k[i] S, v[i]); T, whose product with it is y; P
// and y in the sum of o; e^(G[last] - G[i]) * y[i] in S. T itself is found within 2^-15. Decays are
// within 2^-16 of themselves, whatever the other g are. Its bound is the same with b = 2^-7 + 2^-11
// and
//
//   R       = |beta| |v| + |B| |K| S' 3 / 2 + A y' / 64
//   Z       = |T| (|beta| |v| + |B| |K| S') / 2, for T's rounding: O has |P| Z and N |K|^T W Z more
//
// and, for f16, with 2^-14 and 2^14 for 2^-80 and 2^126, which T must not reach either.
//
// With few heads it cuts sequences into segments, and makes M S + N of a segment's first state S: N
// is the last state that S = 0 would give, and M has those of the columns of the identity with v =
// 0. Both are found as above and kept in f32. In the sums, the magnitudes of a state and of y are
// then those of their parts, |M| |S| + |N| for the state after any chunk of the segment, and M must
// not reach 2^126 (2^14) either. The number of segments follows from the numbers of tokens,
// sequences, heads and multiprocessors, so the bits depend on these too.
#pragma once
#include "bittern/gdn_desc.h"

namespace bittern {

struct GdnChunkForward {
  static constexpr std::string_view kName = "gdn_chunk_forward";
  static constexpr std::string_view kCategory = "gated_delta";
  static constexpr bool kBounded = true;  // has kernels with a bound: see Judge in oracle.h
  static constexpr GdnFields kFields{
      .keys = true, .values = true, .state = true, .scale = true, .gate = true, .fused = true};

  using Desc = GdnDesc;
  struct Args {
    ConstView q, k, v, g, beta;
    ConstView a_log{}, dt_bias{};  // with `gate`
    ConstView mask{}, initial_state{}, cu_seqlens{};
    MutView o;
    MutView final_state{};
  };

  static Status check(const Desc& d) { return check_gdn_desc(kName, d); }
  static Status check_contents(const Desc& d, const Args& a) {
    return check_cu_seqlens(kName, d.rows(), a.cu_seqlens);
  }
  static PrecisionGuarantee contract(const Desc& d) { return exact_guarantee(d.element); }
  static DType element(const Desc& d) { return d.element; }
  static DType aux_element(const Desc&) { return DType::f32; }
  // The chunk form's own, with whole squares: three products with the state, and of each chunk's
  // square q k^T, k k^T, and its products with y, twice.
  static double flops(const Desc& d) {
    const auto k = static_cast<double>(d.key_dim), v = static_cast<double>(d.value_dim);
    return static_cast<double>(d.gate_shape().numel()) * (6 * k * v + 4 * d.chunk * (k + v));
  }
  static std::int64_t elements(const Desc& d) { return d.gate_shape().numel(); }

  template <class D, class F>
  static void fields(D& d, F&& f) {
    visit_gdn_fields<kFields>(d, f);
  }
  template <class A, class F>
  static void operands(const Desc& d, A& a, F&& f) {
    f("q", a.q, Operand{d.element, d.key_shape(), Operand::kStrided});
    f("k", a.k, Operand{d.element, d.key_shape(), Operand::kStrided});
    f("v", a.v, Operand{d.element, d.value_shape(), Operand::kStrided});
    f("g", a.g, Operand{DType::f32, d.gate_shape(), Operand::kScattered});
    f("beta", a.beta, Operand{DType::f32, d.gate_shape(), Operand::kScattered});
    f("a_log", a.a_log, d.gate_operand());
    f("dt_bias", a.dt_bias, d.gate_operand());
    f("mask", a.mask, Operand{DType::u8, d.mask_shape(), Operand::kOptional});
    f("initial_state", a.initial_state, d.state_operand());
    f("cu_seqlens", a.cu_seqlens, d.sequence_operand());
    f("o", a.o, Operand{d.element, d.value_shape(), Operand::kStrided});
    f("final_state", a.final_state, d.state_operand());
  }
};

}  // namespace bittern
