// Weights into the blocks of bittern/gguf_desc.h. All arithmetic is f32, each operation rounded;
// x are the weights of a block: NaN counts as 0, and a weight beyond the largest that the type can
// hold, infinities among them, is clamped to +-65504 times
//
//   Q4_0 8   Q5_0 16   Q8_0 127   Q4_1 Q5_1 1   Q2_K 15   Q3_K 64   Q4_K Q5_K 63   Q6_K 2048
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
//
// The K types minimise the squared error, weighted by `importance` per column where it is given.
// Their codes are the nearest of the stored grid, half to even.
//
//   Q4_K Q5_K   Each group of 32 has an ideal scale and minimum: by a search (16 step widths for
//               its range, a least-squares line through the codes of each), or, with given_grid,
//               from `scales` and `biases`, w = scale q + bias. d and dmin are those of 16 tries
//               each whose multiples sc and mn come nearest to the ideal; then every group tries
//               sc and its neighbours, each with the best mn, and keeps the least error. The
//               groups try once more with d and dmin fitted to these codes by least squares, and
//               the better result is stored.
//   Q2_K        The same for groups of 16, with sc and mn of four bits. For each width the search
//               fits two lines in turn, the second one through the codes that the first one
//               gives.
//   Q6_K Q3_K   The same for groups of 16, with a signed scale and no minimum. Q3_K tries the
//               largest weight of a group at both ends of its codes, Q6_K at the lower one.
//
// IQ4_NL, IQ4_XS and MXFP4 are read only.
//
// Over a tensor of a real model the error is at most ggml's. A negative scale of a given grid means
// the same grid counted from its other end. A bias above 0 cannot be stored, so the grid then runs
// from 0 to the same top. Scales and biases that are not finite count as 0. An importance that is
// not > 0 or not finite counts as 0, and one above 2^40 as 2^40. docs/numerics.md gives every
// step.
#pragma once
#include "bittern/gguf_desc.h"

namespace bittern {

struct GgufQuantize {
  static constexpr std::string_view kName = "gguf_quantize";
  static constexpr std::string_view kCategory = "blocks";

  using Desc = GgufDesc;
  struct Args {
    ConstView w;
    ConstView importance{};        // K types only, one weight per column
    ConstView scales{}, biases{};  // with given_grid only, one per group of 32
    MutView blocks;
  };

  static Status check(const Desc& d) noexcept;
  static PrecisionGuarantee contract(const Desc& d) { return exact_guarantee(d.element); }
  static DType element(const Desc& d) { return d.element; }
  static DType aux_element(const Desc&) { return DType::u8; }
  static std::int64_t elements(const Desc& d) { return d.outer_size * d.axis_size; }

  template <class D, class F>
  static void fields(D& d, F&& f) {
    visit_gguf_fields(d, f);
    f("given_grid", d.given_grid, "fit the blocks to given scales and biases (Q4_K, Q5_K)");
  }
  template <class A, class F>
  static void operands(const Desc& d, A& a, F&& f) {
    f("w", a.w, Operand{d.element, d.tensor_shape(), Operand::kRowStride});
    f("importance", a.importance,
      block_size(d.type).weights == 256
          ? Operand{DType::f32, {{"axis_size", d.axis_size}}, Operand::kOptional}
          : Operand::read_if(false, DType::f32, {{"axis_size", 0}},
                             "a type of 256-weight blocks (the K types)"));
    const Operand grid = Operand::read_if(d.given_grid, DType::f32, d.grid_shape(), "given_grid",
                                          Operand::kRowStride);
    f("scales", a.scales, grid);
    f("biases", a.biases, grid);
    f("blocks", a.blocks, Operand{DType::u8, d.block_shape(), Operand::kRowStride});
  }
};

}  // namespace bittern
