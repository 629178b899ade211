// The scale (and zero point) from the data, then q = clamp(R(x / s) + zp, q_min, q_max) with the
// scale as stored, that is rounded to its dtype.
//
//   symmetric    s = max|x| / q_max                  zp = 0 (not stored)
//   asymmetric   s = (hi - lo) / (q_max - q_min)     zp = clamp(q_min - R(lo / s), q_min, q_max)
//                lo = min(0, min x), hi = max(0, max x)
//
// Each operation rounds to f32 (f64 for f64); s is then limited to the largest finite value of its
// dtype and rounded to that. Only finite x count towards max|x|, lo and hi; where there is none, or
// s as stored is not > 0, s = 1. When hi - lo overflows, s = (hi/2 - lo/2) / (q_max - q_min) * 2.
// zp uses s as stored. x then follows quantize_per_group: infinities saturate, NaN gives zp.
// Symmetric needs q_max > 0; asymmetric needs q_max > q_min.
#pragma once
#include "bittern/quantize_desc.h"

namespace bittern {

struct DynamicQuantize {
  static constexpr std::string_view kName = "dynamic_quantize";
  static constexpr std::string_view kCategory = "quantization";
  static constexpr QuantizeFields kFields{.symmetric = true};

  using Desc = QuantizeDesc;
  struct Args {
    ConstView x;
    MutView scale, zero_point{}, q;  // zero_point: asymmetric only
  };

  static Status check(const Desc& d) noexcept;
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
    if (!d.symmetric) f("zero_point", a.zero_point, Operand{DType::s32, d.param_shape()});
    f("q", a.q, Operand{d.code, d.tensor_shape(), kRows});
  }
};

}  // namespace bittern
