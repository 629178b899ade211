// y = x W^T: y[m][n] is the product of row m of x and row n of W, a matrix as a model stores it
// (bittern/matmul_desc.h), which is never expanded as a whole.
//
// activations float
//
//   y[m][n] = fma(x[m][k], w[n][k], ...), k ascending, from +0
//
//   with w the number that the weight stands for, in f32. NaN and infinities follow IEEE.
//
// activations int16 (the default) and int8: x is quantised, and products are integers.
//
//   Row m of x is cut into groups of 32 (64, where W has groups of 64 or 128), a = max|x| of one.
//   d = max(a / L, 2^-141) with L = 32512 (int16) or 127 (int8), the quotient rounded to f32;
//       d = 0 if a = 0; d = NaN if an element is NaN or infinite, and its codes are then 0
//   c[k] = R(x[k] / d), the quotient rounded to f32, R to the nearest integer, ties to even;
//       0 if d = 0. |c| is at most 32640 or 127.
//
//   The sum runs over the runs of inputs that share both a group of x and a group of W: of 16 for
//   W's groups of 16, of 32, or of 64 for those of 64 and 128. For each run, ascending, from +0:
//
//     C = the sum of c[k],  D = the sum of code[n][k] c[k]       integers, exact
//     acc = fma(b, d C, acc)           where W's type has biases
//     acc = fma(float(D) d, s, acc)
//
//   with s and b of W's group. d C, float(D) and its product with d are rounded to f32, float(D) to
//   the nearest, ties to even. y[m][n] = acc. A NaN or an infinity in a row of x makes all of that
//   row of y NaN, if inputs is not 0.
//
//   An int16 is two bytes, 256 h + l with l in -128 .. 127: two products of bytes.
//
// Kernel cpu_bf16 (activations float, Preference::fastest, a CPU with AVX512_BF16) rounds x and w
// to bf16, nearest even, and adds the same terms in f32, those of two inputs at a time, the odd one
// first. It takes subnormal numbers for 0. Its ErrorNorm is `terms`. Let r_x = 2^-8, or 0 for x in
// bf16, r_w = 2^-8, or 0 for type bf16, and r = r_x + r_w + r_x r_w. Then y[m][n] is off by at most
// error_bound = r + (1 + r) (inputs + 8) 2^-23 times 2^-100 plus the sum of |x[m][k]| |w[n][k]|,
// and one ulp of a bf16 y. In that sum each factor above 0 counts as at least 2^-100. With a term
// that is not finite, the element is NaN or an infinity as in the definition. But nothing is
// promised for an element if that sum or one of its finite factors reaches 2^127, or if an infinity
// meets a number of magnitude below 2^-126. Its bits do not depend on rows, threads and layout.
//
// y is f32, or rounded to x's dtype. A row of y does not depend on the other rows, nor on how many
// there are. Integers have no order and the f32 operations are listed, so every backend, SIMD
// target, thread count and layout gives the same bits, but for cpu_bf16.
#pragma once
#include "bittern/matmul_desc.h"

namespace bittern {

enum class Activations : std::int32_t { exact, int16, int8 };
inline constexpr std::string_view kActivationsNames[] = {"float", "int16", "int8"};
constexpr auto& enum_names(Activations) { return kActivationsNames; }

struct QuantizedMatmulDesc {
  std::int64_t rows = 0;
  WeightDesc weights;
  Activations activations = Activations::int16;
  DType element = DType::f32;  // of x: f32 bf16
  bool f32_y = true;           // y is f32; otherwise it has x's dtype
  bool operator==(const QuantizedMatmulDesc&) const = default;

  DType y_element() const { return f32_y ? DType::f32 : element; }
  // Inputs that share a scale of x, and inputs of a run.
  std::int64_t x_group() const { return weights.group() > 32 ? 64 : 32; }
  std::int64_t run() const { return weights.group() < 32 ? 16 : x_group(); }
  Axes x_shape() const { return {{"rows", rows}, {"inputs", weights.inputs}}; }
  Axes y_shape() const { return {{"rows", rows}, {"outputs", weights.outputs}}; }
};

struct QuantizedMatmul {
  static constexpr std::string_view kName = "quantized_matmul";
  static constexpr std::string_view kCategory = "matmul";
  static constexpr bool kBounded = true;  // has kernels with a bound: see Judge in oracle.h

  using Desc = QuantizedMatmulDesc;
  struct Args {
    ConstView x, w, packed, scales, biases, blocks, panels;
    MutView y;
  };

  static std::int64_t& rows(Desc& d) { return d.rows; }
  static Status check(const Desc& d) noexcept;
  static PrecisionGuarantee contract(const Desc&) { return exact_guarantee(DType::f32); }
  static DType element(const Desc& d) { return d.element; }
  static DType aux_element(const Desc& d) {
    return d.weights.affine() ? DType::u32 : d.weights.blocks() ? DType::u8 : DType::f32;
  }
  static double flops(const Desc& d) {
    return 2.0 * static_cast<double>(d.rows) * static_cast<double>(d.weights.outputs) *
           static_cast<double>(d.weights.inputs);
  }
  static std::int64_t elements(const Desc& d) { return d.weights.outputs * d.weights.inputs; }

  template <class D, class F>
  static void fields(D& d, F&& f) {
    f("rows", d.rows, "rows of x and y");
    visit_weight_fields(d.weights, f);
    f("layout", d.weights.layout, "W as stored, or repacked by pack_panels");
    f("activations", d.activations, "how x enters the products: float, or quantised int16 int8");
    f("element", d.element, "dtype of x: f32 bf16");
    f("f32_y", d.f32_y, "y is f32; otherwise it has x's dtype");
  }
  template <class A, class F>
  static void operands(const Desc& d, A& a, F&& f) {
    f("x", a.x, Operand{d.element, d.x_shape(), Operand::kStrided | Operand::kRowAxes});
    visit_weights(d.weights, a, f);
    f("y", a.y, Operand{d.y_element(), d.y_shape(), Operand::kStrided | Operand::kRowAxes});
  }
};

}  // namespace bittern
