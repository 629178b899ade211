// A depthwise causal convolution along each sequence, with the state it starts from and leaves:
//
//   u[t][c] = bias[c] + sum over j < width of weight[c][j] * x[t - width + 1 + j][c]
//   y[t][c] = silu(u[t][c]), or u[t][c]
//
// Positions t count from the sequence's start. x[-1], x[-2] ... are initial_state's, newest last,
// or +0 where it is left out. final_state receives the last width - 1 inputs, those of
// initial_state included when the sequence is shorter: exact copies.
//
// In f32: u starts from the bias (+0 if left out) and is u = fma(weight, x, u), j ascending; silu
// is core/math.h's; y is rounded to `element` once. Zeros that stand for absent inputs take part in
// the sum like any other.
//
// A token whose mask is 0 is not read: it counts as x = +0, also in final_state, and its y is +0.
// NaN and infinities reach the next width - 1 tokens of their channel and sequence, and no others.
#pragma once
#include "bittern/conv_desc.h"

namespace bittern {

struct CausalConv1d {
  static constexpr std::string_view kName = "causal_conv1d";
  static constexpr std::string_view kCategory = "gated_delta";

  using Desc = CausalConvDesc;
  struct Args {
    ConstView x, weight;
    ConstView bias{}, initial_state{}, mask{}, cu_seqlens{};
    MutView y{}, final_state{};
  };

  static Status check(const Desc& d) { return check_causal_conv_desc(kName, d); }
  static Status check_contents(const Desc& d, const Args& a) {
    return check_cu_seqlens(kName, d.rows(), a.cu_seqlens);
  }
  static PrecisionGuarantee contract(const Desc& d) { return exact_guarantee(d.element); }
  static DType element(const Desc& d) { return d.element; }
  static DType aux_element(const Desc& d) { return d.element; }
  static std::int64_t elements(const Desc& d) { return d.tensor_shape().numel(); }

  template <class D, class F>
  static void fields(D& d, F&& f) {
    visit_causal_conv_fields(d, f);
  }
  template <class A, class F>
  static void operands(const Desc& d, A& a, F&& f) {
    f("x", a.x, Operand{d.element, d.tensor_shape(), Operand::kStrided});
    f("weight", a.weight, Operand{d.element, d.weight_shape()});
    f("bias", a.bias, Operand{d.element, d.bias_shape(), Operand::kOptional});
    f("initial_state", a.initial_state, d.state_operand());
    f("mask", a.mask, Operand{DType::u8, d.mask_shape(), Operand::kOptional});
    f("cu_seqlens", a.cu_seqlens, d.rows().operand());
    f("y", a.y, Operand{d.element, d.tensor_shape(), Operand::kOptional | Operand::kStrided});
    f("final_state", a.final_state, d.state_operand());
  }
};

}  // namespace bittern
