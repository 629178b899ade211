// Scales, biases and codes of a weight, group by group. All arithmetic is f32 (f64 for f64), each
// operation rounded; n = n_bins - 1; min and max are of the group's finite weights.
//
// minmax   s = min((max - min) / n, largest finite value of its dtype), rounded to its dtype;
//          s := 1 when that is not > 0;  b = min + 0 (never -0)
//          q = clamp(A((w - b) / s), 0, n), A rounds half away from zero, s and b as stored
//
// mlx      what MLX's CPU backend does, bit for bit. With R half to even and eps = 1e-7:
//          s = max((max - min) / n, eps), negated unless |min| > |max|
//          edge = |min| > |max| ? min : max;  k = R(edge / s)
//          k != 0: s = edge / k, b = edge;  k = 0: b = 0
//          n_bins = 2 instead: s = max(max - min, eps), b = min + 0 (MLX may store -0)
//          q = clamp(R((w - b) / s), 0, n), with s and b before they are rounded to their dtype
//          MLX's Metal and CUDA kernels differ in three ways: they round half away, start the
//          maximum at 0 (so an all-negative group gets another scale), and clamp only above.
//
// lsq      from minmax's range and, up to 32 bins, from its middle 0.85, 0.7 and 0.55, at most 20
//          times: fit s, b to the codes by least squares (weighted by `importance`), round them to
//          their dtype, re-quantise as minmax does; stop when s and b no longer change, or the fit
//          has no finite s > 0. The start with the least squared error sum c (w - fma(q, s, b))^2
//          counts; minmax's result stays unless one gains at least one part in 2^20.
//          docs/numerics.md gives the sums, their order and the proof.
//
// NaN weights get code 0. Infinite weights saturate to the end codes. No finite weight: s = 1,
// b = 0. When max - min overflows, every method is minmax with
//          s = (max/2 - min/2) / (n/2), bounded as above
//          q = clamp(A((w/2 - b/2) / (s/2)), 0, n)
// For a group with a weight that is not finite, lsq gives minmax's result, and mlx applies its
// formula to the finite weights (MLX itself stores NaN there). With expect_finite the outputs are
// the same, and run returns an error if there was such a weight; kernels that run asynchronously
// cannot, and refuse the field.
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
  static Status not_finite() {
    return invalid("qdq_affine_init: w: holds infinities or NaN, expected finite numbers");
  }
  static PrecisionGuarantee contract(const Desc& d) { return exact_guarantee(d.element); }
  static DType element(const Desc& d) { return d.element; }
  static DType aux_element(const Desc& d) { return d.code_element(); }

  template <class D, class F>
  static void fields(D& d, F&& f) {
    visit_affine_fields(d, f);
    f("method", d.method, "rule for scales and biases");
    f("expect_finite", d.expect_finite, "refuse weights that are infinite or NaN");
  }
  template <class A, class F>
  static void operands(const Desc& d, A& a, F&& f) {
    f("w", a.w, Operand{d.element, d.tensor_shape(), Operand::kRowStride});
    const bool lsq = d.method == AffineMethod::lsq;
    if (lsq)
      f("importance", a.importance,
        Operand{DType::f32, {{"axis_size", d.axis_size}}, Operand::kOptional});
    f("scales", a.scales, Operand{d.scale_element(), d.param_shape()});
    f("biases", a.biases, Operand{d.scale_element(), d.param_shape()});
    f("q", a.q, Operand{d.code_element(), d.code_shape(), Operand::kRowStride});
    if (!lsq)
      f("importance", a.importance,
        Operand::read_if(false, DType::f32, {{"axis_size", 0}}, "method lsq"));
  }
};

}  // namespace bittern
