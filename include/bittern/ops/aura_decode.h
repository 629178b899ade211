// Codes and scales back to rows, by the row format of bittern/aura_desc.h. In f32, each operation
// rounded:
//
//   y_j = s * codebook[code_j], and unless `rotated`, y := P^T y; then rounded to its dtype
//
// `rotated` leaves y in the rotated space, for attention that works there. NaN and infinities
// follow from the operations and affect only their row. The codebook need not be sorted.
#pragma once
#include "bittern/aura_desc.h"

namespace bittern {

struct AuraDecode {
  static constexpr std::string_view kName = "aura_decode";
  static constexpr std::string_view kCategory = "kv_codec";
  static constexpr AuraFields kFields{.codes = true, .rotated = true};

  using Desc = AuraDesc;
  struct Args {
    ConstView packed, scales;
    ConstView table{};  // not for identity, nor for `rotated`
    ConstView codebook;
    MutView y;
  };

  static std::int64_t& rows(Desc& d) { return d.rows; }
  static std::int64_t elements(const Desc& d) { return d.tensor_shape().numel(); }
  static Status check(const Desc& d) { return check_aura_desc(kName, d); }
  static std::string shape_hint(const Desc& d, std::string_view operand, const Shape& found) {
    if (operand == "table") return rotation_hint(operand, d.rotation, found);
    return width_hint(operand, d.dim, d.bits, found);
  }
  static Status check_contents(const Desc& d, const Args& a) {
    if (!d.rotated) BITTERN_TRY(check_rotation(kName, d, a.table));
    return check_codebook(kName, "codebook", a.codebook.as<float>(), d.levels());
  }
  static PrecisionGuarantee contract(const Desc& d) { return exact_guarantee(d.element); }
  static DType element(const Desc& d) { return d.element; }
  static DType aux_element(const Desc&) { return DType::u32; }
  static double flops(const Desc& d) { return d.rotated ? 0 : d.rotation_flops(); }

  template <class D, class F>
  static void fields(D& d, F&& f) {
    visit_aura_fields<kFields>(d, f);
  }
  template <class A, class F>
  static void operands(const Desc& d, A& a, F&& f) {
    f("packed", a.packed, Operand{DType::u32, d.packed_shape(), kAuraRows});
    f("scales", a.scales, Operand{d.scale_element(), d.scale_shape(), kAuraRows});
    visit_rotation(d, a, f, !d.rotated);
    f("codebook", a.codebook, Operand{DType::f32, {{"2^bits", d.levels()}}});
    f("y", a.y, Operand{d.element, d.tensor_shape(), kAuraRows});
    visit_unread_rotation(d, a, f, !d.rotated);
  }
};

}  // namespace bittern
