// Weights into the blocks of bittern/gguf_desc.h. All arithmetic is f32, each operation rounded;
// x are the weights of a block: NaN counts as 0, and a weight beyond the largest that the type can
// hold, infinities among them, is clamped to +-65504 times
//
//   Q4_0 8   Q5_0 16   Q8_0 127   Q4_1 Q5_1 1
//
// so no scale that is stored is infinite or NaN. With f16() to nearest even, A() half away from
// zero, and r = 1 / d, or 0 where d = 0 or 1 / d overflows:
//
//   Q4_0 Q5_0   e = the first weight of largest magnitude;  d = e / -8 (-16)
//               q = min(trunc(x r + 8.5), 15)  (16.5, 31):  ties towards the higher code
//   Q4_1 Q5_1   d = (max - min + 0) / 15 (31);  m = min + 0:  never -0
//               q = min(trunc((x - m) r + 0.5), 15 (31)):   ties towards the higher code
//   Q8_0        d = max |x| / 127;  q = A(x r)
//
// and f16(d), f16(m) are stored. These are ggml's rules: the blocks equal those of the `gguf`
// Python package bit for bit, but for weights that were clamped and the signs of zeros in
// Q4_1 and Q5_1.
#pragma once
#include "bittern/gguf_desc.h"

namespace bittern {

struct GgufQuantize {
  static constexpr std::string_view kName = "gguf_quantize";
  static constexpr std::string_view kCategory = "blocks";

  using Desc = GgufDesc;
  struct Args {
    ConstView w;
    MutView blocks;
  };

  static Status check(const Desc& d);
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
    f("w", a.w, Operand{d.element, d.tensor_shape(), Operand::kRowStride});
    f("blocks", a.blocks, Operand{DType::u8, d.block_shape(), Operand::kRowStride});
  }
};

}  // namespace bittern
