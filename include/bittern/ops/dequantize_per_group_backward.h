// d_q = d_y * s        d_scale = sum of d_y * (q - zp) over the elements that share the scale
//
// q - zp is exact and each product is rounded once, to f32 (f64 for f64). The sum is the halving
// tree over GroupGeometry's order: pad with +0 to a power of two n, then add the element n/2, n/4,
// ... 1 away; a scale without elements gets 0. d_q has y's dtype (codes are taken as real numbers),
// d_scale the scale's; half ones take one more rounding, to nearest even. Either output may be left
// out, not both. In place: d_q may be d_y.
#pragma once
#include "bittern/quantize_desc.h"

namespace bittern {

struct DequantizePerGroupBackward {
  static constexpr std::string_view kName = "dequantize_per_group_backward";
  static constexpr std::string_view kCategory = "quantization";
  static constexpr QuantizeFields kFields{.range = false};

  using Desc = QuantizeDesc;
  struct Args {
    ConstView d_y, q, scale, zero_point{};
    MutView d_q{}, d_scale{};
  };

  static Status check(const Desc& d) { return check_quantize_desc(kName, d, kFields); }
  static PrecisionGuarantee contract(const Desc& d) { return exact_guarantee(d.element); }
  static DType element(const Desc& d) { return d.element; }
  static DType aux_element(const Desc& d) { return d.code; }

  template <class D, class F>
  static void fields(D& d, F&& f) {
    visit_quantize_fields<kFields>(d, f);
  }
  template <class A, class F>
  static void operands(const Desc& d, A& a, F&& f) {
    f("d_y", a.d_y, Operand{d.element, d.tensor_shape(), kRows});
    f("q", a.q, Operand{d.code, d.tensor_shape(), kRows});
    f("scale", a.scale, Operand{d.scale_element(), d.param_shape()});
    f("zero_point", a.zero_point, Operand{DType::s32, d.param_shape(), Operand::kOptional});
    f("d_q", a.d_q, Operand{d.element, d.tensor_shape(), kRows | Operand::kOptional});
    f("d_scale", a.d_scale, Operand{d.scale_element(), d.param_shape(), Operand::kOptional});
  }
};

}  // namespace bittern
