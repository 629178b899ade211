// The inverse of each chunk's unit lower triangular matrix: A = (I + L)^-1, L from gdn_kkt.
//
//   A[i] = e[i] - (sum over j < i of L[i][j] * A[j])
//
// by rows, for rows i, j of one chunk: the sum is acc = fma(L[i][j], A[j][c], acc) in f32, j
// ascending, from 0, and is subtracted from 1 (c = i) or 0. Every j < i counts, also where A[j][c]
// is 0. L is not read on or above the diagonal, nor past a ragged chunk. A is 0 above the diagonal
// (whatever L holds) and past a ragged chunk; it is rounded to a_element last.
// A NaN or infinity of L makes its row and rows below it NaN, in its chunk and head.
#pragma once
#include "bittern/gdn_desc.h"

namespace bittern {

struct GdnSolve {
  static constexpr std::string_view kName = "gdn_solve";
  static constexpr std::string_view kCategory = "gated_delta";
  static constexpr GdnFields kFields{.matrix = true};

  using Desc = GdnDesc;
  struct Args {
    ConstView l;
    ConstView cu_seqlens{};
    MutView a;
  };

  static Status check(const Desc& d) { return check_gdn_desc(kName, d); }
  static Status check_contents(const Desc& d, const Args& a) {
    return check_cu_seqlens(kName, d.rows(), a.cu_seqlens);
  }
  static PrecisionGuarantee contract(const Desc& d) { return exact_guarantee(d.a_element); }
  static DType element(const Desc& d) { return d.a_element; }
  static DType aux_element(const Desc& d) { return d.a_element; }
  // A third of what a product of three full matrices takes.
  static double flops(const Desc& d) {
    return static_cast<double>(d.matrix_shape().numel()) * d.chunk / 3;
  }
  static std::int64_t elements(const Desc& d) { return d.gate_shape().numel(); }

  template <class D, class F>
  static void fields(D& d, F&& f) {
    visit_gdn_fields<kFields>(d, f);
  }
  template <class A, class F>
  static void operands(const Desc& d, A& a, F&& f) {
    f("l", a.l, Operand{DType::f32, d.matrix_shape()});
    f("cu_seqlens", a.cu_seqlens, d.sequence_operand());
    f("a", a.a, Operand{d.a_element, d.matrix_shape()});
  }
};

}  // namespace bittern
