// y = (clamp(R(x / s) + zp, q_min, q_max) - zp) * s
//
// dequantize_per_group(quantize_per_group(x)) in one pass, with the rules of both; no code is
// stored, so q_min and q_max may be any 32-bit range. In place: y may be x.
#pragma once
#include "bittern/quantize_desc.h"

namespace bittern {

struct FakeQuantizePerGroup {
  static constexpr std::string_view kName = "fake_quantize_per_group";
  static constexpr std::string_view kCategory = "quantization";
  static constexpr QuantizeFields kFields{.code = false};

  using Desc = QuantizeDesc;
  struct Args {
    ConstView x, scale, zero_point{};
    MutView y;
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
    f("x", a.x, Operand{d.element, d.tensor_shape(), kRows});
    f("scale", a.scale, Operand{d.scale_element(), d.param_shape()});
    f("zero_point", a.zero_point, Operand{DType::s32, d.param_shape(), Operand::kOptional});
    f("y", a.y, Operand{d.element, d.tensor_shape(), kRows});
  }
};

}  // namespace bittern
