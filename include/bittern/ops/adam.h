// One step of Adam, in place, each element by itself. g is the gradient, t is `step`:
//
//   mean      = fma(beta1, mean, (1 - beta1) * g)
//   variance  = fma(beta2, variance, ((1 - beta2) * g) * g)
//   parameter = parameter - (rate / (1 - beta1^t)) * (mean / fma(1 / sqrt(1 - beta2^t),
//                                                                 sqrt(variance), epsilon))
//
// In f32, each operation rounded once. The factors that do not depend on the element (beta1,
// 1 - beta1, beta2, 1 - beta2, rate / (1 - beta1^t), 1 / sqrt(1 - beta2^t), epsilon) are computed
// in f64 and rounded to f32 once. Powers are products by repeated squaring: for each bit of t from
// the lowest, where it is set power = power * b, then b = b * b, from power = 1 and b = beta.
//
// mean and variance start as zeros, and the first step is 1. NaN and infinities stay in their
// element. A variance of 0 with epsilon 0 gives NaN.
#pragma once
#include "bittern/layers_desc.h"

namespace bittern {

struct Adam {
  static constexpr std::string_view kName = "adam";
  static constexpr std::string_view kCategory = "layers";

  using Desc = AdamDesc;
  struct Args {
    ConstView gradient;
    MutView parameter{}, mean{}, variance{};
  };

  static Status check(const Desc& d) { return check_adam_desc(kName, d); }
  static PrecisionGuarantee contract(const Desc&) { return exact_guarantee(DType::f32); }
  static DType element(const Desc&) { return DType::f32; }
  static DType aux_element(const Desc&) { return DType::f32; }
  static std::int64_t elements(const Desc& d) { return d.count; }

  template <class D, class F>
  static void fields(D& d, F&& f) {
    f("count", d.count, "number of parameters");
    f("rate", d.rate, "how far a step goes");
    f("beta1", d.beta1, "what the mean keeps of itself");
    f("beta2", d.beta2, "what the variance keeps of itself");
    f("epsilon", d.epsilon, "added to the root of the variance");
    f("step", d.step, "the number of this step, from 1");
  }
  template <class A, class F>
  static void operands(const Desc& d, A& a, F&& f) {
    f("gradient", a.gradient, Operand{DType::f32, d.shape()});
    f("parameter", a.parameter, Operand{DType::f32, d.shape(), Operand::kInOut});
    f("mean", a.mean, Operand{DType::f32, d.shape(), Operand::kInOut});
    f("variance", a.variance, Operand{DType::f32, d.shape(), Operand::kInOut});
  }
};

}  // namespace bittern
