// The gradients of gated_rms_norm. With rstd as there, and in each row
//
//   n_j = x_j * rstd     s_j = sigmoid(z_j)     h_j = d_y_j * (z_j * s_j)     e_j = h_j * weight_j
//
//   d_x_j    = rstd * fma(-n_j, (e.n) / dim, e_j)
//   d_z_j    = (d_y_j * (n_j * weight_j)) * silu_slope(z_j)
//   d_weight = sum over rows of h_j * n_j
//
// In f32, each operation rounded once; e.n is summed as core/dot.h says, sigmoid and silu_slope are
// core/math.h's. Results are rounded to `element`. The forward's roundings pass gradients straight
// through. d_weight goes over rows in blocks of 64: sum = fma(h, n, sum) from 0, then the halving
// tree over the blocks, in order. NaN and infinities stay in their row, and in d_weight's column.
#pragma once
#include "bittern/norm_desc.h"

namespace bittern {

struct GatedRmsNormBackward {
  static constexpr std::string_view kName = "gated_rms_norm_backward";
  static constexpr std::string_view kCategory = "gated_delta";

  using Desc = GatedNormDesc;
  struct Args {
    ConstView d_y, x, z, weight;
    MutView d_x{}, d_z{}, d_weight{};
  };

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
  }
  template <class A, class F>
  static void operands(const Desc& d, A& a, F&& f) {
    f("d_y", a.d_y, Operand{d.element, d.shape(), Operand::kRowStride});
    f("x", a.x, Operand{d.element, d.shape(), Operand::kRowStride});
    f("z", a.z, Operand{d.element, d.shape(), Operand::kRowStride});
    f("weight", a.weight, Operand{d.element, d.weight_shape()});
    f("d_x", a.d_x, Operand{d.element, d.shape(), Operand::kRowStride | Operand::kOptional});
    f("d_z", a.d_z, Operand{d.element, d.shape(), Operand::kRowStride | Operand::kOptional});
    f("d_weight", a.d_weight, Operand{d.element, d.weight_shape(), Operand::kOptional});
  }
};

}  // namespace bittern
