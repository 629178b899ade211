// q = clamp(R(x / s) + zp, q_min, q_max)
//
// R rounds half to even. The quotient is a true IEEE division in f32 (f64 for f64 x). R(x/s) + zp
// and the clamp are as if exact: an infinite quotient gives q_max or q_min whatever zp. A NaN
// quotient counts as 0, and so does any quotient with s = 0 or s NaN. Negative scales are fine.
// A zero point left out is 0. Which (s, zp) an element uses: see QuantizeDesc.
#pragma once
#include "bittern/quantize_desc.h"

namespace bittern {

struct QuantizePerGroup {
  static constexpr std::string_view kName = "quantize_per_group";
  static constexpr std::string_view kCategory = "quantization";
  static constexpr QuantizeFields kFields{};

  using Desc = QuantizeDesc;
  struct Args {
    ConstView x, scale, zero_point{};
    MutView q;
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
    f("x", a.x, Operand{d.element, d.tensor_shape(), kRows});
    f("scale", a.scale, Operand{d.scale_element(), d.param_shape()});
    f("zero_point", a.zero_point, Operand{DType::s32, d.param_shape(), Operand::kOptional});
    f("q", a.q, Operand{d.code, d.tensor_shape(), kRows});
  }
};

}  // namespace bittern
