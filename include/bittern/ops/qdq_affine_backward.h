// d_scales = sum of q * d_y        d_biases = sum of d_y        over each group, in one pass
//
// Each product is rounded once, to f32 (f64 for f64). The sums are the halving tree: pad the group
// with zeros to the next power of two n, then add the element n/2, n/4, ... 1 away; every backend
// and vector width gives the same bits. Either output may be left out, not both.
#pragma once
#include "bittern/affine_desc.h"

namespace bittern {

struct QdqAffineBackward {
  static constexpr std::string_view kName = "qdq_affine_backward";
  static constexpr std::string_view kCategory = "affine";

  using Desc = AffineDesc;
  struct Args {
    ConstView d_y, q;
    MutView d_scales{}, d_biases{};
  };

  static Status check(const Desc& d) { return check_affine_desc(kName, d); }
  static PrecisionGuarantee contract(const Desc& d) { return exact_guarantee(d.element); }
  static DType element(const Desc& d) { return d.element; }
  static DType aux_element(const Desc& d) { return d.code_element(); }

  template <class D, class F>
  static void fields(D& d, F&& f) {
    visit_affine_fields(d, f);
  }
  template <class A, class F>
  static void operands(const Desc& d, A& a, F&& f) {
    f("d_y", a.d_y, Operand{d.element, d.tensor_shape(), Operand::kRowStride});
    f("q", a.q, Operand{d.code_element(), d.code_shape(), Operand::kRowStride});
    f("d_scales", a.d_scales, Operand{d.scale_element(), d.param_shape(), Operand::kOptional});
    f("d_biases", a.d_biases, Operand{d.scale_element(), d.param_shape(), Operand::kOptional});
  }
};

}  // namespace bittern
