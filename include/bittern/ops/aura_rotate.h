// y = P x, or y = P^T x if `inverse`: each row of x widened to f32, rotated as bittern/aura_desc.h
// states, and rounded to its dtype. Used for queries, and inversely for attention's output. NaN and
// infinities follow from the operations and affect only their row.
#pragma once
#include "bittern/aura_desc.h"

namespace bittern {

struct AuraRotate {
  static constexpr std::string_view kName = "aura_rotate";
  static constexpr std::string_view kCategory = "kv_codec";
  static constexpr AuraFields kFields{.inverse = true};

  using Desc = AuraDesc;
  struct Args {
    ConstView x;
    ConstView table{};  // not for identity
    MutView y;
  };

  static std::int64_t& rows(Desc& d) { return d.rows; }
  static std::int64_t elements(const Desc& d) { return d.tensor_shape().numel(); }
  static std::string shape_hint(const Desc& d, std::string_view operand, const Shape& found) {
    return rotation_hint(operand, d.rotation, found);
  }
  static Status check(const Desc& d) { return check_aura_desc(kName, d); }
  static Status check_contents(const Desc& d, const Args& a) {
    return check_rotation(kName, d, a.table);
  }
  static PrecisionGuarantee contract(const Desc& d) { return exact_guarantee(d.element); }
  static DType element(const Desc& d) { return d.element; }
  static DType aux_element(const Desc&) { return DType::f32; }
  static double flops(const Desc& d) { return d.rotation_flops(); }

  template <class D, class F>
  static void fields(D& d, F&& f) {
    visit_aura_fields<kFields>(d, f);
  }
  template <class A, class F>
  static void operands(const Desc& d, A& a, F&& f) {
    f("x", a.x, Operand{d.element, d.tensor_shape(), kAuraRows});
    visit_rotation(d, a, f);
    f("y", a.y, Operand{d.element, d.tensor_shape(), kAuraRows});
    visit_unread_rotation(d, a, f);
  }
};

}  // namespace bittern
