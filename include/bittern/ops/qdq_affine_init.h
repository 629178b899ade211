// Scales, biases and codes of a weight, group by group. All arithmetic is f32 (f64 for f64).
//
// minmax   s = (max - min) / (n_bins - 1), s := 1 when not s > 0;  b = min (never -0)
//          q = clamp(A((w - b) / s), 0, n_bins - 1), A rounds half away from zero
//          with s and b as stored, that is rounded to their dtype.
//
// mlx      what MLX's CPU backend does, bit for bit. With n = n_bins - 1 and R half to even:
//          m = |min| > |max|;  s = max((max - min) / n, 1e-7), negated unless m;
//          edge = m ? min : max;  k = R(edge / s);  k != 0: s = edge / k, b = edge;  else b = 0
//          q = clamp(R((w - b) / s), 0, n), with s and b before they are rounded to their dtype.
//          Two bins: s = max - min, b = min (see docs/numerics.md).
//          MLX's Metal and CUDA kernels differ in three ways: they round half away, start the
//          maximum at 0 (so an all-negative group gets another scale), and clamp only above.
//
// lsq      from minmax's codes, at most 20 times: fit s, b to the codes by least squares (weighted
//          by `importance` where given), round them to their dtype, re-quantise as minmax does;
//          stop when the codes stay. Never worse in squared error than minmax, which is what a
//          group keeps when the fit gains nothing, or holds a weight that is not finite.
//          docs/numerics.md gives the sums and their order.
//
// NaN weights are ignored by min and max and get code 0. Infinite weights saturate to the end
// codes; min and max are of the finite weights. No finite weight: s = 1, b = 0. When max - min
// overflows, s and (w - b) / s are as if the exponent range were unbounded, and s never exceeds its
// dtype's largest finite value.
#pragma once
#include "bittern/affine_desc.h"

namespace bittern {

struct QdqAffineInit {
  static constexpr std::string_view kName = "qdq_affine_init";
  static constexpr std::string_view kCategory = "affine";

  using Desc = AffineDesc;
  struct Args {
    ConstView w;
    ConstView importance{};  // lsq only, one weight per column; not > 0 or not finite counts as 0
    MutView scales, biases, q;
  };

  static Status check(const Desc& d) { return check_affine_desc(kName, d); }
  static PrecisionGuarantee contract(const Desc& d) { return exact_guarantee(d.element); }
  static DType element(const Desc& d) { return d.element; }
  static DType aux_element(const Desc& d) { return d.code_element(); }

  template <class D, class F>
  static void fields(D& d, F&& f) {
    visit_affine_fields(d, f);
    f("method", d.method, "rule for scale and bias: minmax mlx lsq");
  }
  template <class A, class F>
  static void operands(const Desc& d, A& a, F&& f) {
    f("w", a.w, Operand{d.element, d.tensor_shape(), Operand::kRowStride});
    if (d.method == AffineMethod::lsq)
      f("importance", a.importance, Operand{DType::f32, {d.axis_size}, Operand::kOptional});
    f("scales", a.scales, Operand{d.scale_element(), d.param_shape()});
    f("biases", a.biases, Operand{d.scale_element(), d.param_shape()});
    f("q", a.q, Operand{d.code_element(), d.code_shape(), Operand::kRowStride});
  }
};

}  // namespace bittern
