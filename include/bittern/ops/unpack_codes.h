// codes[j] = bits [j*bits, (j+1)*bits) of a row's little-endian bit stream in u32 words: the
// inverse of pack_codes.
#pragma once
#include "bittern/ops/pack_codes.h"

namespace bittern {

struct UnpackCodes {
  static constexpr std::string_view kName = "unpack_codes";
  static constexpr std::string_view kCategory = "packing";

  using Desc = PackDesc;
  struct Args {
    ConstView packed;
    MutView codes;
  };

  static Status check(const Desc& d) { return check_pack_desc(kName, d); }
  static PrecisionGuarantee contract(const Desc&) { return kIntegerGuarantee; }
  static DType element(const Desc&) { return DType::u8; }
  static DType aux_element(const Desc&) { return DType::u32; }

  template <class D, class F>
  static void fields(D& d, F&& f) {
    visit_pack_fields(d, f);
  }
  template <class A, class F>
  static void operands(const Desc& d, A& a, F&& f) {
    f("packed", a.packed, Operand{DType::u32, d.packed_shape(), Operand::kRowStride});
    f("codes", a.codes, Operand{DType::u8, d.code_shape(), Operand::kRowStride});
  }
};

}  // namespace bittern
