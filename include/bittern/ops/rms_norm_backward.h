// The gradients of rms_norm. x is what was normalised: `sum`, where the forward had a residual.
// With rstd as there, and in each row
//
//   n_j = x_j * rstd     e_j = d_y_j * (weight_j + offset)
//
//   d_x_j    = rstd * fma(-n_j, (e.n) / dim, e_j), plus d_sum_j if d_sum is given
//   d_weight = sum over rows of d_y_j * n_j
//
// d_sum is the gradient that reaches x by another way: the residual stream's. d_x may be its
// memory.
//
// In f32, each operation rounded once; x.x and e.n are summed as core/dot.h says, eps and offset
// are rounded to f32. Results are rounded to `element`. The forward's roundings pass gradients
// straight through. d_weight goes over rows in blocks of 64: sum = fma(d_y, n, sum) from 0, then
// the halving tree over the blocks, in order. NaN and infinities stay in their row, and in
// d_weight's column. A row of zeros gives NaN when eps is 0.
#pragma once
#include "bittern/layers_desc.h"

namespace bittern {

struct RmsNormBackward {
  static constexpr std::string_view kName = "rms_norm_backward";
  static constexpr std::string_view kCategory = "layers";

  using Desc = RmsNormDesc;
  struct Args {
    ConstView d_y, x, weight;
    ConstView d_sum{};
    MutView d_x{}, d_weight{};
  };

  static Status check(const Desc& d) { return check_rms_norm_desc(kName, d); }
  static PrecisionGuarantee contract(const Desc& d) { return exact_guarantee(d.element); }
  static DType element(const Desc& d) { return d.element; }
  static DType aux_element(const Desc& d) { return d.element; }
  static std::int64_t elements(const Desc& d) { return d.shape().numel(); }

  template <class D, class F>
  static void fields(D& d, F&& f) {
    f("rows", d.rows, "number of rows");
    f("dim", d.dim, "length of a row");
    f("eps", d.eps, "added to the mean square");
    f("offset", d.offset, "added to the weight: 1 for Gemma's 1 + w");
    f("element", d.element, "dtype of the tensors: f32 f16 bf16");
  }
  template <class A, class F>
  static void operands(const Desc& d, A& a, F&& f) {
    constexpr unsigned kLayout = Operand::kStrided | Operand::kRowAxes;
    constexpr unsigned kMayBeLeftOut = kLayout | Operand::kOptional | Operand::kInPlace;
    f("d_y", a.d_y, Operand{d.element, d.shape(), kLayout});
    f("x", a.x, Operand{d.element, d.shape(), kLayout});
    f("weight", a.weight, Operand{d.element, d.weight_shape()});
    f("d_sum", a.d_sum, Operand{d.element, d.shape(), kMayBeLeftOut});
    f("d_x", a.d_x, Operand{d.element, d.shape(), kMayBeLeftOut});
    f("d_weight", a.d_weight, Operand{d.element, d.weight_shape(), Operand::kOptional});
  }
};

}  // namespace bittern
