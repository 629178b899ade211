// The inverse of pack_panels: weights as a model stores them, from panels. The rows that the last
// panel has beyond `outputs` are not read.
#pragma once
#include "bittern/matmul_desc.h"

namespace bittern {

struct UnpackPanels {
  static constexpr std::string_view kName = "unpack_panels";
  static constexpr std::string_view kCategory = "matmul";

  using Desc = WeightDesc;
  struct Args {
    ConstView panels;
    MutView w, packed, scales, biases, blocks;
  };

  static Status check(const Desc& d) { return check_weight_desc(kName, d); }
  static PrecisionGuarantee contract(const Desc&) { return kPanelGuarantee; }
  static DType element(const Desc&) { return DType::u8; }
  static DType aux_element(const Desc& d) { return d.affine() ? DType::u32 : DType::u8; }
  static std::int64_t elements(const Desc& d) { return d.outputs * d.inputs; }

  template <class D, class F>
  static void fields(D& d, F&& f) {
    visit_weight_fields(d, f);
  }
  template <class A, class F>
  static void operands(const Desc& d, A& a, F&& f) {
    f("panels", a.panels, Operand{DType::u8, d.panel_shape()});
    visit_stored_weights(d, a, true, f);
  }
};

}  // namespace bittern
