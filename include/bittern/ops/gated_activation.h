// The gate of an MLP:
//
//   y = f(gate) * up     f = silu (swiglu), gelu_tanh (geglu_tanh) or gelu (geglu_erf)
//
// In f32; silu is core/math.h's, gelu and gelu_tanh are core/activations.h's. The product is
// rounded once, and to `element`. With rounding = each, f(gate) is rounded to `element` before it
// is used.
//
// gate and up have strides of their own, so they may be halves of one matrix; y may be the memory
// of either. f(-infinity) is NaN.
#pragma once
#include "bittern/layers_desc.h"

namespace bittern {

struct GatedActivation {
  static constexpr std::string_view kName = "gated_activation";
  static constexpr std::string_view kCategory = "layers";

  using Desc = GatedActivationDesc;
  struct Args {
    ConstView gate, up;
    MutView y;
  };

  static std::int64_t& rows(Desc& d) { return d.rows; }
  static Status check(const Desc& d) { return check_gated_activation_desc(kName, d); }
  static PrecisionGuarantee contract(const Desc& d) { return exact_guarantee(d.element); }
  static DType element(const Desc& d) { return d.element; }
  static DType aux_element(const Desc& d) { return d.element; }
  static std::int64_t elements(const Desc& d) { return d.shape().numel(); }

  template <class D, class F>
  static void fields(D& d, F&& f) {
    f("rows", d.rows, "number of rows");
    f("dim", d.dim, "length of a row");
    f("kind", d.kind, "function of the gate: silu, gelu by tanh, or gelu");
    f("element", d.element, "dtype of the tensors: f32 f16 bf16");
    f("rounding", d.rounding, "round once, or after the function and after the product");
  }
  template <class A, class F>
  static void operands(const Desc& d, A& a, F&& f) {
    constexpr unsigned kLayout = Operand::kStrided | Operand::kRowAxes | Operand::kInPlace;
    f("gate", a.gate, Operand{d.element, d.shape(), kLayout});
    f("up", a.up, Operand{d.element, d.shape(), kLayout});
    f("y", a.y, Operand{d.element, d.shape(), kLayout});
  }
};

}  // namespace bittern
