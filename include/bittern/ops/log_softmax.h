// The logarithm of a row's softmax:
//
//   v_j = x_j                                     without softcap
//   v_j = softcap * tanh(x_j / softcap)         with softcap > 0
//   v_j = v_j / temperature                       with temperature != 1
//   m = max v      l = sum of exp(v_j - m)      y_j = (v_j - m) - log(l)
//
// In f32, each operation rounded once; softcap and temperature are rounded to f32, exp is
// core/math.h's, tanh core/activations.h's. l is summed in f64: the elements of a block of 4096 go
// to 16 chains, element j to chain j mod 16, which the halving tree adds; the blocks are added in
// order. log is core/exp_log.h's, in f64, and is rounded to f32 once.
//
// y is f32. A row that holds NaN or +infinity, or nothing but -infinity, gives NaN. -infinity
// beside finite numbers gives -infinity. y may be the memory of an f32 x.
#pragma once
#include "bittern/layers_desc.h"

namespace bittern {

struct LogSoftmax {
  static constexpr std::string_view kName = "log_softmax";
  static constexpr std::string_view kCategory = "layers";

  using Desc = LogSoftmaxDesc;
  struct Args {
    ConstView x;
    MutView y;
  };

  static std::int64_t& rows(Desc& d) { return d.rows; }
  static Status check(const Desc& d) { return check_log_softmax_desc(kName, d); }
  static PrecisionGuarantee contract(const Desc& d) { return exact_guarantee(d.element); }
  static DType element(const Desc& d) { return d.element; }
  static DType aux_element(const Desc& d) { return d.element; }
  static std::int64_t elements(const Desc& d) { return d.shape().numel(); }

  template <class D, class F>
  static void fields(D& d, F&& f) {
    f("rows", d.rows, "number of rows");
    f("dim", d.dim, "length of a row");
    f("softcap", d.softcap, "limit that tanh bends the logits to; 0: none");
    f("temperature", d.temperature, "divides the logits");
    f("element", d.element, "dtype of x: f32 f16 bf16");
  }
  template <class A, class F>
  static void operands(const Desc& d, A& a, F&& f) {
    constexpr unsigned kLayout = Operand::kStrided | Operand::kRowAxes | Operand::kInPlace;
    f("x", a.x, Operand{d.element, d.shape(), kLayout});
    f("y", a.y, Operand{DType::f32, d.shape(), kLayout});
  }
};

}  // namespace bittern
