// A row normalised to root mean square 1, weighted, and gated:
//
//   rstd = 1 / sqrt((x.x) / dim + eps)
//   y_j  = ((x_j * rstd) * weight_j) * silu(z_j)
//
// In f32, each operation above rounded once; x.x is summed as core/dot.h says, silu is
// core/math.h's, eps is rounded to f32. y is rounded to `element`. With rounding = each so are x_j
// * rstd and its product with weight_j, before they are used.
//
// A row of zeros gives zeros (NaN when eps is 0). NaN and infinities stay in their row.
#pragma once
#include "bittern/norm_desc.h"

namespace bittern {

struct GatedRmsNorm {
  static constexpr std::string_view kName = "gated_rms_norm";
  static constexpr std::string_view kCategory = "gated_delta";

  using Desc = GatedNormDesc;
  struct Args {
    ConstView x, z, weight;
    MutView y;
  };

  static std::int64_t& rows(Desc& d) { return d.rows; }
  static Status check(const Desc& d) { return check_gated_norm_desc(kName, d); }
  static PrecisionGuarantee contract(const Desc& d) { return exact_guarantee(d.element); }
  static DType element(const Desc& d) { return d.element; }
  static DType aux_element(const Desc& d) { return d.element; }
  static std::int64_t elements(const Desc& d) { return d.shape().numel(); }

  template <class D, class F>
  static void fields(D& d, F&& f) {
    f("rows", d.rows, "number of rows");
    f("dim", d.dim, "length of a row");
    f("eps", d.eps, "added to the mean square");
    f("element", d.element, "dtype of the tensors: f32 f16 bf16");
    f("rounding", d.rounding, "round once, or after each of norm, weight and gate");
  }
  template <class A, class F>
  static void operands(const Desc& d, A& a, F&& f) {
    f("x", a.x, Operand{d.element, d.shape(), Operand::kStrided | Operand::kRowAxes});
    f("z", a.z, Operand{d.element, d.shape(), Operand::kStrided | Operand::kRowAxes});
    f("weight", a.weight, Operand{d.element, d.weight_shape()});
    f("y", a.y, Operand{d.element, d.shape(), Operand::kStrided | Operand::kRowAxes});
  }
};

}  // namespace bittern
