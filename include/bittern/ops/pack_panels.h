// Weights as a model stores them, into the panels that quantized_matmul and embedding read fastest
// (layout panels). The bytes of bittern/matmul_desc.h are put in another order and nothing else is
// done to them, so unpack_panels brings every bit back. As many bytes as stored, for outputs
// rounded up to a multiple of 16; the rows that the last panel lacks are zeros.
#pragma once
#include "bittern/matmul_desc.h"

namespace bittern {

struct PackPanels {
  static constexpr std::string_view kName = "pack_panels";
  static constexpr std::string_view kCategory = "matmul";

  using Desc = WeightDesc;
  struct Args {
    ConstView w, packed, scales, biases, blocks;
    MutView panels;
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
    visit_stored_weights(d, a, true, f);
    f("panels", a.panels, Operand{DType::u8, d.panel_shape()});
  }
};

}  // namespace bittern
