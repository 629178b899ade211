// Code j of a row goes to bits [j*bits, (j+1)*bits) of a little-endian bit stream in u32 words:
//
//   packed[w] = OR over j of (codes[j] mod 2^bits) << (j*bits - 32*w), kept to 32 bits
//
// A code may continue in the next word. A row has ceil(axis_size * bits / 32) words, and its unused
// bits are zero. bits is 1..8. This is MLX's layout, and that of the KV codec.
#pragma once
#include "bittern/affine_desc.h"

namespace bittern {

struct PackDesc {
  std::int64_t outer_size = 0;
  std::int64_t axis_size = 0;
  std::int32_t bits = 4;
  bool operator==(const PackDesc&) const = default;
  Axes code_shape() const { return {{"outer_size", outer_size}, {"axis_size", axis_size}}; }
  Axes packed_shape() const {
    return {{"outer_size", outer_size}, {"words", packed_words(axis_size, bits)}};
  }
};

Status check_pack_desc(std::string_view op, const PackDesc& d) noexcept;

template <class D, class F>
void visit_pack_fields(D& d, F&& f) {
  f("outer_size", d.outer_size, "number of rows");
  f("axis_size", d.axis_size, "codes per row");
  f("bits", d.bits, "bits per code, 1..8");
}

// Integers only.
inline constexpr PrecisionGuarantee kIntegerGuarantee{.math_precision = DType::u32,
                                                      .accumulator = DType::u32};

struct PackCodes {
  static constexpr std::string_view kName = "pack_codes";
  static constexpr std::string_view kCategory = "packing";

  using Desc = PackDesc;
  struct Args {
    ConstView codes;
    MutView packed;
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
    f("codes", a.codes, Operand{DType::u8, d.code_shape(), Operand::kRowStride});
    f("packed", a.packed, Operand{DType::u32, d.packed_shape(), Operand::kRowStride});
  }
};

}  // namespace bittern
