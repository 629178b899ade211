// y[i] = row ids[i] of W: the numbers that its weights stand for (bittern/matmul_desc.h), in f32,
// rounded to y's dtype.
#pragma once
#include "bittern/matmul_desc.h"

namespace bittern {

struct EmbeddingDesc {
  std::int64_t rows = 0;
  WeightDesc weights;
  DType element = DType::f32;  // of y: f32 f16 bf16
  bool operator==(const EmbeddingDesc&) const = default;

  Axes id_shape() const { return {{"rows", rows}}; }
  Axes y_shape() const { return {{"rows", rows}, {"inputs", weights.inputs}}; }
};

struct Embedding {
  static constexpr std::string_view kName = "embedding";
  static constexpr std::string_view kCategory = "matmul";

  using Desc = EmbeddingDesc;
  struct Args {
    ConstView ids, w, packed, scales, biases, blocks, panels;
    MutView y;
  };

  static Status check(const Desc& d) noexcept;
  // Ids are 0 .. outputs - 1.
  static Status check_contents(const Desc& d, const Args& a) noexcept;
  static PrecisionGuarantee contract(const Desc& d) { return exact_guarantee(d.element); }
  static DType element(const Desc& d) { return d.element; }
  static DType aux_element(const Desc&) { return DType::s32; }
  static std::int64_t elements(const Desc& d) { return d.y_shape().numel(); }

  template <class D, class F>
  static void fields(D& d, F&& f) {
    f("rows", d.rows, "number of ids");
    visit_weight_fields(d.weights, f);
    f("layout", d.weights.layout, "W as stored, or repacked by pack_panels");
    f("element", d.element, "dtype of y: f32 f16 bf16");
  }
  template <class A, class F>
  static void operands(const Desc& d, A& a, F&& f) {
    f("ids", a.ids, Operand{DType::s32, d.id_shape()});
    visit_weights(d.weights, a, f);
    f("y", a.y, Operand{d.element, d.y_shape(), Operand::kRowStride});
  }
};

}  // namespace bittern
