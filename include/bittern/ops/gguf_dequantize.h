// y[j] = s q[j] - m (s q[j] + m in Q4_1 and Q5_1), with s = d sc and m = dmin mn in the K formats,
// and y[j] = s v[q[j]] in IQ4_NL, IQ4_XS and MXFP4, from the blocks of bittern/gguf_desc.h: each
// operation in f32, rounded, in this order; then y is rounded to its dtype. Types without m
// subtract nothing.
//
// f32 results equal those of the `gguf` Python package bit for bit, infinities and signed zeros
// included: blocks are any bytes, so d, m and dmin may be infinite, NaN or subnormal, and follow
// IEEE arithmetic (an infinite scale times code 0 is NaN). Bits of a NaN are not promised.
#pragma once
#include "bittern/gguf_desc.h"

namespace bittern {

struct GgufDequantize {
  static constexpr std::string_view kName = "gguf_dequantize";
  static constexpr std::string_view kCategory = "blocks";

  using Desc = GgufDesc;
  struct Args {
    ConstView blocks;
    MutView y;
  };

  static Status check(const Desc& d) { return check_gguf_desc(kName, d); }
  static PrecisionGuarantee contract(const Desc& d) { return exact_guarantee(d.element); }
  static DType element(const Desc& d) { return d.element; }
  static DType aux_element(const Desc&) { return DType::u8; }
  static std::int64_t elements(const Desc& d) { return d.outer_size * d.axis_size; }

  template <class D, class F>
  static void fields(D& d, F&& f) {
    visit_gguf_fields(d, f);
  }
  template <class A, class F>
  static void operands(const Desc& d, A& a, F&& f) {
    f("blocks", a.blocks, Operand{DType::u8, d.block_shape(), Operand::kRowStride});
    f("y", a.y, Operand{d.element, d.tensor_shape(), Operand::kRowStride});
  }
};

}  // namespace bittern
