// d_x = d_y / s   where q_min <= R(x / s) + zp <= q_max,   else 0
//
// The straight-through estimator of quantize_per_group: R(x/s) + zp is the very value the forward
// clamps (NaN quotient counts as 0, the sum is exact), both ends are inside, and d_y / s is a true
// division. s = 0 gives 0; s NaN gives d_y / s, that is NaN, where zp is in range. In place: d_x
// may be d_y or x.
#pragma once
#include "bittern/quantize_desc.h"

namespace bittern {

struct QuantizePerGroupBackward {
  static constexpr std::string_view kName = "quantize_per_group_backward";
  static constexpr std::string_view kCategory = "quantization";
  static constexpr QuantizeFields kFields{.code = false};

  using Desc = QuantizeDesc;
  struct Args {
    ConstView d_y, x, scale, zero_point{};
    MutView d_x;
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
    f("d_x", a.d_x, Operand{d.element, d.tensor_shape(), kRows});
  }
};

}  // namespace bittern
