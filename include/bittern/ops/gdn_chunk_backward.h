// The gradient of gdn_chunk_forward: from d_o and d_final_state (0 if left out) to d_q, d_k, d_v,
// d_g, d_beta and d_initial_state, through the normalisation, gate and sigmoid where these are
// fused, then also d_a_log and d_dt_bias (0 without `gate`).
//
// The forward pass is computed anew; q, k, beta, G, L, P, y and S (before the chunk) are as in
// gdn_chunk_forward.h, q being normalised and scaled. Chunks go from the last to the first, with H
// the gradient of the state after the chunk. For rows i, j of a chunk, e[i] = e^G[i], l[i] =
// e^(G[last] - G[i]), E[i][j] = e^(G[i] - G[j]), b[i] = -(beta[i] * e[i]), and sums over j:
//
//   r[i]     = (l[i] * (k[i] H) + sum j >= i of P[j][i] d_o[j]) - (sum j > i of L[j][i] r[j])
//   dl[i][j] = -(r[i] . y[j])   j < i      DL[i][j] = dl[i][j] * E[i][j]
//   dp[i][j] = d_o[i] . y[j]    j <= i     DP[i][j] = dp[i][j] * E[i][j]
//   M[i]     = r[i] S^T        N[i] = d_o[i] S^T        Z[i] = y[i] H^T
//   X[i][j]  = beta[i] * DL[i][j], X[i][i] = 0
//   dq[i]    = e[i] * N[i] + sum j <= i of DP[i][j] k[j]
//   dk[i]    = fma(b[i], M[i], l[i] * Z[i]) + sum j >= i of DP[j][i] q[j]
//              + sum j <= i of X[i][j] k[j] + sum j >= i of X[j][i] k[j]
//   dv[i]    = beta[i] * r[i]
//   dbeta[i] = fma(-e[i], k[i] . M[i], r[i] . v[i]) + (DL[i] . (k k^T)[i] over j < i)
//   W[i][j]  = fma(dl[i][j], L[i][j], dp[i][j] * P[i][j])        j < i
//   C[i][j]  = C[i+1][j] + W[i][j]                               j < i
//   f[i]     = f[i+1] + fma(b[i], k[i] . M[i], e[i] * (q[i] . N[i]))
//   z[i]     = z[i-1] + l[i-1] * (k[i-1] . Z[i-1])
//   dg[i]    = fma(e[last], <S, H>, (f[i] + (sum j < i of C[i][j])) + z[i])
//   H        = e[last] * H + sum of k[i]^T (b[i] * r[i]) + sum of q[i]^T (e[i] * d_o[i])
//
// dg[i] adds up what g[i] decays and nothing else: terms that g[i] does not decay need not cancel.
//
// All of it in f32; X, the rounding of d_q, d_k and d_v to `element`, comes last. Products of
// matrices and sums written after one another are acc = fma(a, b, acc), terms ascending, from what
// stands before them or from 0; but the sum over j > i in r descends, and is subtracted at the end.
// a . b is core/dot.h's sum, so is that of C[i] (times 1); <S, H> is the sum over the columns of S,
// ascending, of their dot products; C, f and z start from 0. Every other operation is rounded once.
//
// Then the d_q and d_k of a key head are summed over its value heads, in order of heads, and with
// a = g + dt_bias, rate = -exp(a_log), and n the normalised k, or q before it is scaled:
//
//   d_q = X(scale * dq), d_k = X(dk)     or, if qk_l2norm, with D either one before X:
//         X(1 / sqrt(x.x + 1e-6) * fma(-(D . n), n, D))
//   d_g = (dg * rate) * (a > 20 ? 1 : sigmoid(a)), if gate; a reset has dg, which is 0, and adds
//         nothing to:
//   d_dt_bias = sum of d_g, d_a_log = sum of dg * (rate * softplus(a)): over the tokens of a
//         sequence, ascending, acc + d_g and acc = fma(dg, rate * softplus(a), acc), from 0; then
//         over sequences
//   d_beta = dbeta * slope, if beta_sigmoid, with slope = sigmoid(beta) * sigmoid(-beta), twice
//         that if allow_neg_eigval (1 - sigmoid(beta) would lose its digits near 0)
//
// The gradients of a masked token are 0, and its d_o is not looked at. NaN and infinities stay in
// their sequence and head, or key head for d_q and d_k (d_a_log and d_dt_bias: head).
//
// Kernel cuda_wgmma (Preference::fastest, sm_90, element bf16 or f16, key_dim 64 or 128, value_dim
// a multiple of 64, chunk 64) keeps S, H and all sums in f32. It rounds to `element` what enters a
// product: S, H, y and r; P and T = (I + L)^-1; the right sides that T turns into y and r;
// e^(G[last] - G[i]) y[i], b[i] r[i] and e[i] d_o[i] on their way into S and H; DP and X. k and q
// enter as they are, and norms and scale go to the other side. d_v, r . v and <S, H> are made of
// the rounded ones, too. Its ErrorNorm is `terms`, and error_bound is b = 2^-7 + 2^-11. S, y and
// the sums D and Y are those of gdn_chunk_forward.h for the kernel of that name; with its letters,
// and ' as there, let
//
//   F_c     what a change of H before a later chunk c has become after this one: every chunk in
//           between makes e^G[last] F_c - K^T B T^T W K F_c of it
//   D_h     = the sum over c of |F_c| N_c;                         H' = |H| + b D_h
//   R_h     = (W |K| H' + |P|^T |d_o|) 3 / 2 + C^T |d_o| / 64 + A^T r' / 64
//   D_r     = |T|^T R_h + the sum over c of |T^T W K F_c| N_c;     r' = |r| + b D_r
//   Z_h     = |T|^T (W |K| H' + |P|^T |d_o|) / 2, for T's rounding
//   N       = |K|^T |B| (r' / 2 + Z_h) + |Q|^T E |d_o| / 2 + e^G[last] H' / 64 + |K^T B T^T| R_h
//
// Then H, also as d_initial_state, is off by at most b D_h, and r by b D_r. Rounded, x in S, H, y,
// r is off by b U(x), U(x) = D(x) + x' / 2. A product of two such is off by b (U(x) y' + x' U(y) +
// x' y' / 64), and each gradient by what the formulas above make of these, with magnitudes for all
// other factors, half the magnitude of each DP and X, and a 64th of all terms; d_q, d_k and d_v and
// their like in `element` by an ulp more. Each factor above 0 counts as at least 2^-80 (f16:
// 2^-14). If an input is NaN or infinite (other than g = -infinity), or if a magnitude that is
// rounded reaches 2^126 (f16: 2^14), or another one 2^126, nothing is promised for that sequence
// and head (or key head).
//
// With few heads it cuts sequences into segments, as gdn_chunk_forward.h says for S. H before a
// segment is M^T H + N' of H after it: N' is what H = 0 would give, and M the one of S. What is
// said there of the magnitudes of S and y then holds for H and r too, with |M|^T |H| + |N'|.
#pragma once
#include "bittern/gdn_desc.h"

namespace bittern {

struct GdnChunkBackward {
  static constexpr std::string_view kName = "gdn_chunk_backward";
  static constexpr std::string_view kCategory = "gated_delta";
  static constexpr bool kBounded = true;  // has kernels with a bound: see Judge in oracle.h
  static constexpr GdnFields kFields{
      .keys = true, .values = true, .state = true, .scale = true, .gate = true, .fused = true};

  using Desc = GdnDesc;
  struct Args {
    ConstView d_o;
    ConstView d_final_state{};
    ConstView q, k, v, g, beta;
    ConstView a_log{}, dt_bias{};  // with `gate`
    ConstView mask{}, initial_state{}, cu_seqlens{};
    MutView d_q, d_k, d_v, d_g, d_beta;
    MutView d_a_log{}, d_dt_bias{}, d_initial_state{};
  };

  static Status check(const Desc& d) { return check_gdn_desc(kName, d); }
  static Status check_contents(const Desc& d, const Args& a) {
    return check_cu_seqlens(kName, d.rows(), a.cu_seqlens);
  }
  static PrecisionGuarantee contract(const Desc& d) { return exact_guarantee(d.element); }
  static DType element(const Desc& d) { return d.element; }
  static DType aux_element(const Desc&) { return DType::f32; }
  // With whole squares: eight products with a state, seven of a chunk's square with keys, five with
  // values.
  static double flops(const Desc& d) {
    const auto k = static_cast<double>(d.key_dim), v = static_cast<double>(d.value_dim);
    return 2.0 * static_cast<double>(d.gate_shape().numel()) *
           (8 * k * v + d.chunk * (7 * k + 5 * v));
  }
  static std::int64_t elements(const Desc& d) { return d.gate_shape().numel(); }

  template <class D, class F>
  static void fields(D& d, F&& f) {
    visit_gdn_fields<kFields>(d, f);
  }
  template <class A, class F>
  static void operands(const Desc& d, A& a, F&& f) {
    const Operand head{DType::f32, d.head_shape(), Operand::kOptional};
    const Operand state = d.state_operand();
    f("d_o", a.d_o, Operand{d.element, d.value_shape(), Operand::kStrided});
    f("d_final_state", a.d_final_state, state);
    f("q", a.q, Operand{d.element, d.key_shape(), Operand::kStrided});
    f("k", a.k, Operand{d.element, d.key_shape(), Operand::kStrided});
    f("v", a.v, Operand{d.element, d.value_shape(), Operand::kStrided});
    f("g", a.g, Operand{DType::f32, d.gate_shape(), Operand::kScattered});
    f("beta", a.beta, Operand{DType::f32, d.gate_shape(), Operand::kScattered});
    f("a_log", a.a_log, d.gate_operand());
    f("dt_bias", a.dt_bias, d.gate_operand());
    f("mask", a.mask, Operand{DType::u8, d.mask_shape(), Operand::kOptional});
    f("initial_state", a.initial_state, state);
    f("cu_seqlens", a.cu_seqlens, d.sequence_operand());
    f("d_q", a.d_q, Operand{d.element, d.key_shape(), Operand::kStrided});
    f("d_k", a.d_k, Operand{d.element, d.key_shape(), Operand::kStrided});
    f("d_v", a.d_v, Operand{d.element, d.value_shape(), Operand::kStrided});
    f("d_g", a.d_g, Operand{DType::f32, d.gate_shape(), Operand::kScattered});
    f("d_beta", a.d_beta, Operand{DType::f32, d.gate_shape(), Operand::kScattered});
    f("d_a_log", a.d_a_log, head);
    f("d_dt_bias", a.d_dt_bias, head);
    f("d_initial_state", a.d_initial_state, state);
  }
};

}  // namespace bittern
