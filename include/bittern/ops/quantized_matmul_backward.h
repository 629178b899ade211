// The gradients of quantized_matmul with activations float, y = x W^T. W is never made as a whole,
// and nor is its gradient dw, unless d_w asks for it.
//
//   d_x[m][k] = fma(d_y[m][n], w[n][k], ...), n ascending, from +0
//
// with w the number that the weight stands for, in f32 (bittern/matmul_desc.h). With type affine,
// where w = code s + b, there are also the gradients of scales and biases. For group g of row n:
//
//   dw[n][k]       = fma(d_y[m][n], x[m][k], ...), m ascending, from +0
//   d_scales[n][g] = fma(code[n][k], dw[n][k], ...), k of the group ascending, from +0
//   d_biases[n][g] = the sum of dw[n][k], k of the group ascending, from +0
//   d_w[n][k]      = dw[n][k]
//
// All in f32. The rounding of w passes gradients straight through. NaN and infinities follow IEEE.
// Any output may be left out, not all of them. x is read for d_scales, d_biases and d_w alone, and
// may be left out if none of them is wanted. Without rows these are 0, without outputs d_x is.
// Every backend, SIMD target, thread count and layout gives the same bits, but for cpu_bf16.
//
// Kernel cpu_bf16 (Preference::fastest, a CPU with AVX512_BF16) rounds d_y, x and w to bf16,
// nearest even, and adds the terms of d_x and dw in f32, those of two outputs or rows at a time,
// the odd one first. It takes subnormal numbers for 0. Sums over groups are as above. Its bits
// do not depend on the number of threads. Its ErrorNorm is `terms`: with r = 2^-7 + 2^-16, an
// element is off by at most error_bound = r + (1 + r) (terms + 8) 2^-23 times
//
//   d_x[m][k]       2^-100 + the sum of |d_y[m][n]| |w[n][k]|
//   d_w[n][k]       2^-100 + the sum of |d_y[m][n]| |x[m][k]|
//   d_scales[n][g]  2^-100 + the sum of code[n][k] times that of d_w[n][k]
//   d_biases[n][g]  2^-100 + the sum of those of d_w[n][k]
//
// where terms is outputs or, with type affine, rows + group_size if that is more. In products each
// factor above 0 counts as at least 2^-100. With a term that is not finite, the element is NaN or
// an infinity as in the definition. But nothing is promised for an element if such a sum or one of
// its finite factors reaches 2^127, or if an infinity meets a number of
// magnitude below 2^-126.
#pragma once
#include "bittern/matmul_desc.h"

namespace bittern {

struct QuantizedMatmulBackwardDesc {
  std::int64_t rows = 0;
  WeightDesc weights;
  bool operator==(const QuantizedMatmulBackwardDesc&) const = default;

  Axes x_shape() const { return {{"rows", rows}, {"inputs", weights.inputs}}; }
  Axes y_shape() const { return {{"rows", rows}, {"outputs", weights.outputs}}; }
  Axes d_w_shape() const {
    return {{"outputs", weights.outputs}, {"inputs", weights.affine() ? weights.inputs : 0}};
  }
};

struct QuantizedMatmulBackward {
  static constexpr std::string_view kName = "quantized_matmul_backward";
  static constexpr std::string_view kCategory = "matmul";
  static constexpr bool kBounded = true;  // has kernels with a bound: see Judge in oracle.h

  using Desc = QuantizedMatmulBackwardDesc;
  struct Args {
    ConstView d_y, x, w, packed, scales, biases, blocks, panels;
    MutView d_x{}, d_scales{}, d_biases{}, d_w{};
  };

  static Status check(const Desc& d) noexcept;
  // d_scales, d_biases and d_w need x.
  static Status check_contents(const Desc& d, const Args& a) noexcept;
  static PrecisionGuarantee contract(const Desc&) { return exact_guarantee(DType::f32); }
  static DType element(const Desc&) { return DType::f32; }
  static DType aux_element(const Desc& d) {
    return d.weights.affine() ? DType::u32 : d.weights.blocks() ? DType::u8 : DType::f32;
  }
  // Of all outputs.
  static double flops(const Desc& d) {
    return (d.weights.affine() ? 4.0 : 2.0) * static_cast<double>(d.rows) *
           static_cast<double>(d.weights.outputs) * static_cast<double>(d.weights.inputs);
  }
  static std::int64_t elements(const Desc& d) { return d.weights.outputs * d.weights.inputs; }

  template <class D, class F>
  static void fields(D& d, F&& f) {
    f("rows", d.rows, "rows of x and d_y");
    visit_weight_fields(d.weights, f);
    f("layout", d.weights.layout, "W as stored, or repacked by pack_panels");
  }
  template <class A, class F>
  static void operands(const Desc& d, A& a, F&& f) {
    const auto grid = Operand::read_if(d.weights.affine(), DType::f32, d.weights.grid_shape(),
                                       "type affine", Operand::kRowStride | Operand::kOptional);
    f("d_y", a.d_y, Operand{DType::f32, d.y_shape(), Operand::kStrided});
    f("x", a.x, Operand{DType::f32, d.x_shape(), Operand::kStrided | Operand::kOptional});
    visit_weights(d.weights, a, f);
    f("d_x", a.d_x, Operand{DType::f32, d.x_shape(), Operand::kStrided | Operand::kOptional});
    f("d_scales", a.d_scales, grid);
    f("d_biases", a.d_biases, grid);
    f("d_w", a.d_w,
      Operand::read_if(d.weights.affine(), DType::f32, d.d_w_shape(), "type affine",
                       Operand::kRowStride | Operand::kOptional));
  }
};

}  // namespace bittern
