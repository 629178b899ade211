// The gradients of causal_conv1d. With u, x and the sequences as there (u is computed anew, in f32,
// and never rounded further), and positions counted from the sequence's start:
//
//   d_u[t][c]         = d_y[t][c] * silu_slope(u[t][c]), or d_y[t][c];  +0 past the sequence's end
//   d_x[t][c]         = sum over j < width of weight[c][j] * d_u[t + width - 1 - j][c]
//                       + d_final_state's value for x[t], where final_state holds x[t]
//   d_initial_state   the same at the positions t < 0
//   d_weight[c][j]    = sum over tokens of d_u[t][c] * x[t - width + 1 + j][c]
//   d_bias[c]         = sum over tokens of d_u[t][c]
//
// d_x is sum = fma(weight, d_u, sum), j ascending, from 0, then + d_final_state (only where that is
// given and has a value), rounded to `element` once. At t < 0 the d_u of tokens before the start
// are +0 and take part.
//
// d_weight and d_bias go over each sequence in blocks of 64 tokens from its start: inside a block
// sum = fma(d_u, x, sum) (sum + d_u for the bias), t ascending, from 0; then the halving tree over
// all blocks of all sequences, in order. So bits do not depend on threads.
//
// A masked token's d_y is not read: its d_u and its d_x are +0, and x there counts as +0.
//
// Kernel cuda_quick (Preference::fastest, with silu) makes silu_slope of the GPU's estimates of
// exp2 and 1 / x, and sums blocks of 256 tokens where there are many. Its ErrorNorm is `terms` and
// error_bound 2^-16. With s = sigmoid(u), at least 2^-100, the terms of d_u are
// |d_y| s (1 + |u| (1 - s)), and those of the gradients the sums above with these and with
// magnitudes. Where they reach 2^127, nothing is promised.
#pragma once
#include "bittern/conv_desc.h"

namespace bittern {

struct CausalConv1dBackward {
  static constexpr std::string_view kName = "causal_conv1d_backward";
  static constexpr std::string_view kCategory = "gated_delta";
  static constexpr bool kBounded = true;  // has kernels with a bound: see Judge in oracle.h

  using Desc = CausalConvDesc;
  struct Args {
    ConstView d_y;
    ConstView d_final_state{};
    ConstView x, weight;
    ConstView bias{}, initial_state{}, mask{}, cu_seqlens{};
    MutView d_x{}, d_weight{}, d_bias{}, d_initial_state{};
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
    f("d_y", a.d_y, Operand{d.element, d.tensor_shape(), Operand::kStrided});
    f("d_final_state", a.d_final_state, d.state_operand());
    f("x", a.x, Operand{d.element, d.tensor_shape(), Operand::kStrided});
    f("weight", a.weight, Operand{d.element, d.weight_shape()});
    f("bias", a.bias, Operand{d.element, d.bias_shape(), Operand::kOptional});
    f("initial_state", a.initial_state, d.state_operand());
    f("mask", a.mask, Operand{DType::u8, d.mask_shape(), Operand::kOptional});
    f("cu_seqlens", a.cu_seqlens, d.rows().operand());
    f("d_x", a.d_x, Operand{d.element, d.tensor_shape(), Operand::kOptional | Operand::kStrided});
    f("d_weight", a.d_weight, Operand{d.element, d.weight_shape(), Operand::kOptional});
    f("d_bias", a.d_bias, Operand{d.element, d.bias_shape(), Operand::kOptional});
    f("d_initial_state", a.d_initial_state, d.state_operand());
  }
};

}  // namespace bittern
