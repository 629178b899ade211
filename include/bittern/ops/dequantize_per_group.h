// y = (q - zp) * s
//
// The difference is exact (a 33-bit integer) and the product is rounded once, to f32 (f64 for f64);
// half y then takes one more rounding to its dtype, to nearest even. A zero point left out is 0.
#pragma once
#include "bittern/quantize_desc.h"

namespace bittern {

struct DequantizePerGroup {
  static constexpr std::string_view kName = "dequantize_per_group";
  static constexpr std::string_view kCategory = "quantization";
  static constexpr QuantizeFields kFields{.range = false};

  using Desc = QuantizeDesc;
  struct Args {
    ConstView q, scale, zero_point{};
    MutView y;
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
    f("q", a.q, Operand{d.code, d.tensor_shape(), kRows});
    f("scale", a.scale, Operand{d.scale_element(), d.param_shape()});
    f("zero_point", a.zero_point, Operand{DType::s32, d.param_shape(), Operand::kOptional});
    f("y", a.y, Operand{d.element, d.tensor_shape(), kRows});
  }
};

}  // namespace bittern
