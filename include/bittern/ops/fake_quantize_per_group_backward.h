// With z = x / s, in range: q_min <= R(z) + zp <= q_max, and q = clamp(R(z) + zp, q_min, q_max):
//
//   d_x          = in range ? d_y : 0
//   d_scale      = sum of d_y * (in range ? R(z) - z : q - zp)
//   d_zero_point = sum of (in range ? 0 : -(s * d_y))
//
// z follows quantize_per_group (NaN, s = 0 and s NaN count as 0). R(z) - z and q - zp are exact,
// each product is rounded once, to f32 (f64 for f64). Sums are the halving tree over
// GroupGeometry's order, padded with +0. d_scale and d_zero_point have the scale's dtype; half ones
// take one more rounding, to nearest even. Any output may be left out, not all three. In place: d_x
// may be d_y or x.
#pragma once
#include "bittern/quantize_desc.h"

namespace bittern {

struct FakeQuantizePerGroupBackward {
  static constexpr std::string_view kName = "fake_quantize_per_group_backward";
  static constexpr std::string_view kCategory = "quantization";
  static constexpr QuantizeFields kFields{.code = false};

  using Desc = QuantizeDesc;
  struct Args {
    ConstView d_y, x, scale, zero_point{};
    MutView d_x{}, d_scale{}, d_zero_point{};
  };

  static Status check(const Desc& d) { return check_quantize_desc(kName, d, kFields); }
  static PrecisionGuarantee contract(const Desc& d) { return exact_guarantee(d.element); }
  static DType element(const Desc& d) { return d.element; }
  static DType aux_element(const Desc& d) { return d.scale_element(); }

  template <class D, class F>
  static void fields(D& d, F&& f) {
    visit_quantize_fields<kFields>(d, f);
  }
  template <class A, class F>
  static void operands(const Desc& d, A& a, F&& f) {
    f("d_y", a.d_y, Operand{d.element, d.tensor_shape(), kRows});
    f("x", a.x, Operand{d.element, d.tensor_shape(), kRows});
    f("scale", a.scale, Operand{d.scale_element(), d.param_shape()});
    f("zero_point", a.zero_point, Operand{DType::s32, d.param_shape(), Operand::kOptional});
    f("d_x", a.d_x, Operand{d.element, d.tensor_shape(), kRows | Operand::kOptional});
    f("d_scale", a.d_scale, Operand{d.scale_element(), d.param_shape(), Operand::kOptional});
    f("d_zero_point", a.d_zero_point,
      Operand{d.scale_element(), d.param_shape(), Operand::kOptional});
  }
};

}  // namespace bittern
