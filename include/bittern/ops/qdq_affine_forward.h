// y = q * s + b
//
// rounding once   fma(q, s, b) in f32 (f64 for f64): one rounding, then the conversion to y's dtype
// rounding mlx    the product is rounded to y's dtype before the addition, then the sum is, as in
//                 MLX's CPU backend
//
// Codes are not checked; packed codes have `bits` bits, so none exceeds 2^bits - 1.
#pragma once
#include "bittern/affine_desc.h"

namespace bittern {

struct QdqAffineForward {
  static constexpr std::string_view kName = "qdq_affine_forward";
  static constexpr std::string_view kCategory = "affine";

  using Desc = AffineDesc;
  struct Args {
    ConstView q, scales, biases;
    MutView y;
  };

  static Status check(const Desc& d) { return check_affine_desc(kName, d); }
  static PrecisionGuarantee contract(const Desc& d) { return exact_guarantee(d.element); }
  static DType element(const Desc& d) { return d.element; }
  static DType aux_element(const Desc& d) { return d.code_element(); }

  template <class D, class F>
  static void fields(D& d, F&& f) {
    visit_affine_fields(d, f);
    f("rounding", d.rounding, "round once, or the product too as MLX does");
  }
  template <class A, class F>
  static void operands(const Desc& d, A& a, F&& f) {
    f("q", a.q, Operand{d.code_element(), d.code_shape(), Operand::kRowStride});
    f("scales", a.scales, Operand{d.scale_element(), d.param_shape()});
    f("biases", a.biases, Operand{d.scale_element(), d.param_shape()});
    f("y", a.y, Operand{d.element, d.tensor_shape(), Operand::kRowStride});
  }
};

}  // namespace bittern
