// Rotary position embedding: pairs of elements of a head, turned by an angle that grows with the
// token's position.
//
//   angle = positions[t] * inverse_frequencies[i]     i < rotary_dim / 2
//   c = cos(angle) * factor       s = sin(angle) * factor
//   y_a = x_a * c - x_b * s       y_b = x_b * c + x_a * s
//
// a, b = i, i + rotary_dim / 2 (layout half) or 2 i, 2 i + 1 (interleaved). Elements from
// rotary_dim on are copied. `factor` is yarn's scaling of attention; bittern/rope_frequencies.h
// makes the frequencies.
//
// The angle is the product in f64, which is exact for |position| <= 2^29. cos and sin are
// core/angle.h's, within 0.501 ulp of f32 for |angle| < 2^30, and NaN for larger angles. The other
// operations are in f32, each rounded once; factor is rounded to f32, y to `element`.
//
// y may be the memory of x. NaN and infinities stay in their pair.
//
// The gradient is rope itself with negated frequencies: cos is even and sin odd, so it turns d_y
// back, times the same factor.
#pragma once
#include "bittern/layers_desc.h"

namespace bittern {

struct Rope {
  static constexpr std::string_view kName = "rope";
  static constexpr std::string_view kCategory = "layers";

  using Desc = RopeDesc;
  struct Args {
    ConstView x, positions, inverse_frequencies;
    MutView y;
  };

  static Status check(const Desc& d) { return check_rope_desc(kName, d); }
  static PrecisionGuarantee contract(const Desc& d) { return exact_guarantee(d.element); }
  static DType element(const Desc& d) { return d.element; }
  static DType aux_element(const Desc& d) { return d.element; }
  static std::int64_t elements(const Desc& d) { return d.shape().numel(); }

  template <class D, class F>
  static void fields(D& d, F&& f) {
    f("tokens", d.tokens, "number of tokens");
    f("heads", d.heads, "heads of a token");
    f("dim", d.dim, "elements of a head");
    f("rotary_dim", d.rotary_dim, "elements of a head that are rotated, from its first on; even");
    f("factor", d.factor, "multiplies cos and sin");
    f("element", d.element, "dtype of x and y: f32 f16 bf16");
    f("layout", d.layout, "pairs: half (i and i + rotary_dim/2) or interleaved (2i and 2i + 1)");
  }
  template <class A, class F>
  static void operands(const Desc& d, A& a, F&& f) {
    f("x", a.x, Operand{d.element, d.shape(), Operand::kStrided | Operand::kInPlace});
    f("positions", a.positions, Operand{DType::s32, {{"tokens", d.tokens}}});
    f("inverse_frequencies", a.inverse_frequencies, Operand{DType::f32, d.frequency_shape()});
    f("y", a.y, Operand{d.element, d.shape(), Operand::kStrided | Operand::kInPlace});
  }
};

}  // namespace bittern
