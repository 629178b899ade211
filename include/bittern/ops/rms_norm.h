// A row normalised to root mean square 1 and weighted, after an optional addition:
//
//   s_j  = x_j + residual_j, rounded to `element`; x_j where residual is left out
//   rstd = 1 / sqrt((s.s) / dim + eps)
//   y_j  = (s_j * rstd) * (weight_j + offset)
//
// In f32, each operation above rounded once; s.s is summed as core/dot.h says, eps and offset are
// rounded to f32. y is rounded to `element`. With rounding = each, s_j * rstd is rounded to
// `element` before it is used. `sum` receives s. It may be the memory of residual, so that one call
// updates the residual stream and normalises it.
//
// A row of zeros gives zeros (NaN when eps is 0). NaN and infinities stay in their row.
#pragma once
#include "bittern/layers_desc.h"

namespace bittern {

struct RmsNorm {
  static constexpr std::string_view kName = "rms_norm";
  static constexpr std::string_view kCategory = "layers";

  using Desc = RmsNormDesc;
  struct Args {
    ConstView x, weight;
    ConstView residual{};
    MutView y{}, sum{};
  };

  static std::int64_t& rows(Desc& d) { return d.rows; }
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
    f("rounding", d.rounding, "round once, or after the norm and after the weight");
  }
  template <class A, class F>
  static void operands(const Desc& d, A& a, F&& f) {
    constexpr unsigned kLayout = Operand::kStrided | Operand::kRowAxes;
    f("x", a.x, Operand{d.element, d.shape(), kLayout});
    f("weight", a.weight, Operand{d.element, d.weight_shape()});
    f("residual", a.residual,
      Operand{d.element, d.shape(), kLayout | Operand::kOptional | Operand::kInPlace});
    f("y", a.y, Operand{d.element, d.shape(), kLayout});
    f("sum", a.sum,
      Operand{d.element, d.shape(),
              kLayout | Operand::kOptional | Operand::kExtra | Operand::kInPlace});
  }
};

}  // namespace bittern
