// The gated delta rule's WY factors of each chunk, from A = (I + L)^-1:
//
//   u[i] = X(sum over j of A[i][j] * vb[j])      vb[j] = X(v[j] * beta[j])
//   w[i] = X(sum over j of A[i][j] * kb[j])      kb[j] = X((k[j] * beta[j]) * e^g[j])
//
// for rows i, j of one chunk, g being summed from the chunk's start (gdn_cumsum). X rounds to
// `element`, nearest even. v * beta, k * beta and (k * beta) * e^g are each rounded to f32 first,
// e^g is exp of core/math.h, within 1 ulp. A sum is acc = fma(A[i][j], b[j], acc) in f32, j
// ascending, from 0. So each result lies within 64 * 2^-24 * sum |terms| and half an ulp of the
// exact product of the rounded operands.
//
// j runs over the tokens of the chunk: columns of A past a ragged chunk are never read. All of
// these j count, also those above the diagonal; with lower_triangular those alone with j <= i, and
// the others are not read. NaN and infinities go where these products put them: no further than
// their chunk and head. Either output may be left out.
//
// Kernels cuda_mma and cuda_wgmma (f16 and bf16, Preference::fastest) add the same terms in another
// order, and tensor cores truncate where fma rounds. Their ErrorNorm is `terms`: each element of u
// and w is off by at most error_bound = 2 chunk 2^-24 times the sum of |A[i][j]| |b[j]|, b being vb
// or kb, and one ulp of `element`. In that sum an |A[i][j]| > 0 counts as at least 2^-114. With a
// term that is not finite, the element is NaN or an infinity as in the definition. But if the sum
// of the finite magnitudes reaches 2^127, one order may overflow and the other not, and nothing is
// promised for that element.
#pragma once
#include "bittern/gdn_desc.h"

namespace bittern {

struct GdnRecomputeWU {
  static constexpr std::string_view kName = "gdn_recompute_w_u";
  static constexpr std::string_view kCategory = "gated_delta";
  static constexpr bool kBounded = true;  // has kernels with a bound: see Judge in oracle.h
  static constexpr GdnFields kFields{
      .keys = true, .values = true, .matrix = true, .triangle = true};

  using Desc = GdnDesc;
  struct Args {
    ConstView k, v, beta, g, a;
    ConstView cu_seqlens{};
    MutView w{}, u{};
  };

  static Status check(const Desc& d) { return check_gdn_desc(kName, d); }
  static Status check_contents(const Desc& d, const Args& a) {
    return check_cu_seqlens(kName, d.rows(), a.cu_seqlens);
  }
  static PrecisionGuarantee contract(const Desc& d) { return exact_guarantee(d.element); }
  static DType element(const Desc& d) { return d.element; }
  static DType aux_element(const Desc& d) { return d.a_element; }
  // Two multiplications' worth for every element of A, whether or not a triangle is skipped.
  static double flops(const Desc& d) {
    return 2.0 * static_cast<double>(d.matrix_shape().numel()) *
           static_cast<double>(d.key_dim + d.value_dim);
  }
  static std::int64_t elements(const Desc& d) { return d.gate_shape().numel(); }

  template <class D, class F>
  static void fields(D& d, F&& f) {
    visit_gdn_fields<kFields>(d, f);
  }
  template <class A, class F>
  static void operands(const Desc& d, A& a, F&& f) {
    f("k", a.k, Operand{d.element, d.key_shape()});
    f("v", a.v, Operand{d.element, d.value_shape()});
    f("beta", a.beta, Operand{DType::f32, d.gate_shape()});
    f("g", a.g, Operand{DType::f32, d.gate_shape()});
    f("a", a.a, Operand{d.a_element, d.matrix_shape()});
    f("cu_seqlens", a.cu_seqlens, d.sequence_operand());
    f("w", a.w, Operand{d.element, d.w_shape(), Operand::kOptional});
    f("u", a.u, Operand{d.element, d.value_shape(), Operand::kOptional});
  }
};

}  // namespace bittern
