// The matrix of each chunk's delta rule, strictly lower triangular:
//
//   l[i][j] = (beta[i] * (k[i] . k[j])) * e^(g[i] - g[j])      j < i; 0 for all other j < chunk
//
// for rows i, j of one chunk, g being summed from its start (gdn_cumsum, with its bound). The dot
// product is acc = fma(k[i][d], k[j][d], acc) in f32, d ascending, from 0; the difference, the
// exponential (core/math.h, within 1 ulp) and the two products are each rounded once to f32. The
// exponential is taken of differences with j < i alone: never above 0 for log decays that are not,
// so it cannot overflow; g down to -1e4 a token gives 0, not NaN (-infinity gives NaN).
//
// Kernel cuda_mma (Preference::fastest, f16 and bf16, key_dim 64 or 128, chunk 64) adds the terms
// of the dot product in another order, and tensor cores truncate where fma rounds. Its exponentials
// are within 2^-16 of themselves. Its ErrorNorm is `terms`: an element is off by at most
// error_bound = 2^-15 times |beta[i]| (|k[i]| . |k[j]|) e^(g[i] - g[j]), where each of the three
// factors counts as at least 2^-80 if it is above 0. With a factor that is not finite the element
// is what the definition makes of it, unless the exponential is subnormal. If the exponential, or
// |beta[i]| (|k[i]| . |k[j]|), or the product of both reaches 2^126, nothing is promised for that
// element.
#pragma once
#include "bittern/gdn_desc.h"

namespace bittern {

struct GdnKkt {
  static constexpr std::string_view kName = "gdn_kkt";
  static constexpr std::string_view kCategory = "gated_delta";
  static constexpr bool kBounded = true;  // has kernels with a bound: see Judge in oracle.h
  static constexpr GdnFields kFields{.keys = true};

  using Desc = GdnDesc;
  struct Args {
    ConstView k, beta, g;
    ConstView cu_seqlens{};
    MutView l;
  };

  static Status check(const Desc& d) { return check_gdn_desc(kName, d); }
  static Status check_contents(const Desc& d, const Args& a) {
    return check_cu_seqlens(kName, d.rows(), a.cu_seqlens);
  }
  static PrecisionGuarantee contract(const Desc& d) { return exact_guarantee(d.element); }
  static DType element(const Desc& d) { return d.element; }
  static DType aux_element(const Desc&) { return DType::f32; }
  // Of the whole square.
  static double flops(const Desc& d) {
    return 2.0 * static_cast<double>(d.matrix_shape().numel()) * static_cast<double>(d.key_dim);
  }
  static std::int64_t elements(const Desc& d) { return d.gate_shape().numel(); }

  template <class D, class F>
  static void fields(D& d, F&& f) {
    visit_gdn_fields<kFields>(d, f);
  }
  template <class A, class F>
  static void operands(const Desc& d, A& a, F&& f) {
    f("k", a.k, Operand{d.element, d.key_shape()});
    f("beta", a.beta, Operand{DType::f32, d.gate_shape()});
    f("g", a.g, Operand{DType::f32, d.gate_shape()});
    f("cu_seqlens", a.cu_seqlens, d.sequence_operand());
    f("l", a.l, Operand{DType::f32, d.matrix_shape()});
  }
};

}  // namespace bittern
