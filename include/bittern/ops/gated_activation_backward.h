// The gradients of gated_activation:
//
//   d_gate = (d_y * up) * f'(gate)
//   d_up   = d_y * f(gate)
//
// In f32, each operation rounded once, and results to `element`. f is the forward's; its slope f'
// is silu_slope of core/math.h (swiglu), gelu_tanh_slope (geglu_tanh) or gelu_slope (geglu_erf) of
// core/activations.h. The forward's rounding of f(gate) passes gradients straight through, and
// d_up has f(gate) before it.
//
// Each tensor has strides of its own, so gate and up, and their gradients, may be halves of one
// matrix. Either gradient may be the memory of gate, up or d_y. NaN stays in its element, which is
// also NaN where f or f' is: swiglu's f' at both infinities, f at -infinity.
#pragma once
#include "bittern/layers_desc.h"

namespace bittern {

struct GatedActivationBackward {
  static constexpr std::string_view kName = "gated_activation_backward";
  static constexpr std::string_view kCategory = "layers";

  using Desc = GatedActivationDesc;
  struct Args {
    ConstView d_y, gate, up;
    MutView d_gate{}, d_up{};
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
  }
  template <class A, class F>
  static void operands(const Desc& d, A& a, F&& f) {
    constexpr unsigned kLayout = Operand::kStrided | Operand::kRowAxes | Operand::kInPlace;
    constexpr unsigned kResult = kLayout | Operand::kOptional;
    f("d_y", a.d_y, Operand{d.element, d.shape(), kLayout});
    f("gate", a.gate, Operand{d.element, d.shape(), kLayout});
    f("up", a.up, Operand{d.element, d.shape(), kLayout});
    f("d_gate", a.d_gate, Operand{d.element, d.shape(), kResult});
    f("d_up", a.d_up, Operand{d.element, d.shape(), kResult});
  }
};

}  // namespace bittern
