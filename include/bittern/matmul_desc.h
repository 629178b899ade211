// The weights of the matmul family: a matrix W [outputs, inputs] as a model file stores it, or
// repacked into panels.
//
// Stored:
//   f32 f16 bf16      w [outputs, inputs]
//   affine            packed: codes of `bits` bits in u32 words (bittern/affine_desc.h), scales and
//                     biases for every group of group_size weights
//   Q4_0 ... MXFP4    blocks of GGUF (bittern/gguf_desc.h)
//
// Every quantised type gives a weight as an integer code c, a scale s and, where it has one, a bias
// b of its group:
//
//   affine            c = q; s and b as stored, widened to f32
//   Q4_1 Q5_1         c = q, s = d, b = m
//   Q2_K Q4_K Q5_K    c = q, s = d sc, b = -(dmin mn), the products rounded to f32
//   Q4_0 Q5_0 Q8_0    c = q - 8, q - 16, q; s = d; no bias
//   Q3_K Q6_K         c = q - 4, q - 32; s = d (sc - 32), d sc, rounded to f32; no bias
//   IQ4_NL IQ4_XS     c = v[q]; s = d, d (sc - 32), rounded to f32; no bias
//   MXFP4             c = v[q]; s = 2^(e - 128); no bias
//
// The number that a weight stands for is that of qdq_affine_forward (f32, rounded once) and of
// gguf_dequantize: fma(c, s, b) for affine, and s c + b for the others, product and sum each
// rounded.
//
// Panels: the same bytes in the order in which a product reads them. A panel holds 16 rows, one
// after the other for each field, so that row r is lane r of a vector of 16. The rows that the last
// panel lacks are zeros. Panels of two matrices of the same type and inputs, laid one after
// another, are the panels of one matrix, if the first has a multiple of 16 outputs.
//
//   f32 f16 bf16   for each input, 16 weights
//   the others     A unit of a row is a group (affine) or a block (GGUF). For each unit there is a
//                  header, the row's fields other than codes, in this order:
//                    affine           scale, bias
//                    Q4_0 Q5_0 Q8_0 IQ4_NL   d
//                    Q4_1 Q5_1        d, m
//                    Q2_K             d, dmin, scales as 4 u32
//                    Q3_K             d, scales as 3 u32
//                    Q4_K Q5_K        d, dmin, scales as 3 u32
//                    Q6_K             d, sc as 4 u32
//                    IQ4_XS           d, sh, sl as u32
//                    MXFP4            e
//                  each field 16 times. Then codes: for every 32 of a row, planes of 4, 2 or 1 bits
//                  (bits 2: 2; 3: 2 and 1; 4: 4; 5: 4 and 1; 6: 4 and 2; 8: one of 8), the low bits
//                  of a code in the first. A plane of p bits is p vectors of 16 u32: code
//                  4 i + t of the 32 has its bits at bit 8 t + p (i mod 8/p) of lane r of vector
//                  i p / 8. Q8_0's codes are stored plus 128.
//                  If 16 headers are not a multiple of 64 bytes, the headers of 2 units (MXFP4: 4)
//                  come before the codes of these units; the last of a row may be fewer.
#pragma once
#include <cstdint>
#include <string_view>

#include "bittern/affine_desc.h"
#include "bittern/gguf_desc.h"
#include "bittern/plan.h"

namespace bittern {

enum class WeightType : std::int32_t {
  f32,
  f16,
  bf16,
  affine,
  q4_0,
  q4_1,
  q5_0,
  q5_1,
  q8_0,
  q2_k,
  q3_k,
  q4_k,
  q5_k,
  q6_k,
  iq4_nl,
  iq4_xs,
  mxfp4
};
inline constexpr std::string_view kWeightTypeNames[] = {
    "f32",  "f16",  "bf16", "affine", "Q4_0", "Q4_1",   "Q5_0",   "Q5_1", "Q8_0",
    "Q2_K", "Q3_K", "Q4_K", "Q5_K",   "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"};
constexpr auto& enum_names(WeightType) { return kWeightTypeNames; }

enum class WeightLayout : std::int32_t { stored, panels };
inline constexpr std::string_view kWeightLayoutNames[] = {"stored", "panels"};
constexpr auto& enum_names(WeightLayout) { return kWeightLayoutNames; }

constexpr WeightType weight_type(BlockType type) {
  return static_cast<WeightType>(static_cast<std::int32_t>(type) +
                                 static_cast<std::int32_t>(WeightType::q4_0));
}

struct WeightDesc {
  std::int64_t outputs = 0;
  std::int64_t inputs = 0;
  WeightType type = WeightType::affine;
  std::int32_t bits = 4;             // read with affine: 2 3 4 5 6 8
  std::int64_t group_size = 64;      // read with affine: 32 64 128
  DType scale_element = DType::f16;  // read with affine: dtype of scales and biases
  WeightLayout layout = WeightLayout::stored;
  bool operator==(const WeightDesc&) const = default;

  static constexpr std::int64_t kPanelRows = 16;
  bool plain() const { return type < WeightType::affine; }
  bool affine() const { return type == WeightType::affine; }
  bool blocks() const { return type > WeightType::affine; }
  bool stored() const { return layout == WeightLayout::stored; }
  BlockType block_type() const {  // when blocks()
    return static_cast<BlockType>(static_cast<std::int32_t>(type) -
                                  static_cast<std::int32_t>(WeightType::q4_0));
  }
  DType plain_element() const {  // when plain()
    return type == WeightType::f32   ? DType::f32
           : type == WeightType::f16 ? DType::f16
                                     : DType::bf16;
  }
  // Weights that share a scale; 0: there are no scales.
  std::int64_t group() const {
    return plain() ? 0 : affine() ? group_size : block_size(block_type()).group;
  }
  std::int64_t panels() const { return outputs / kPanelRows + (outputs % kPanelRows != 0); }
  std::int64_t words() const { return affine() ? packed_words(inputs, bits) : 0; }
  std::int64_t groups() const { return affine() && group_size > 0 ? inputs / group_size : 0; }
  // Of a stored row, all operands together.
  std::int64_t row_bytes() const {
    if (plain()) return inputs * static_cast<std::int64_t>(size_of(plain_element()));
    if (affine())
      return 4 * words() + 2 * groups() * static_cast<std::int64_t>(size_of(scale_element));
    const BlockSize size = block_size(block_type());
    return inputs / size.weights * size.bytes;
  }
  Axes plain_shape() const { return {{"outputs", outputs}, {"inputs", inputs}}; }
  Axes packed_shape() const { return {{"outputs", outputs}, {"words", words()}}; }
  Axes grid_shape() const { return {{"outputs", outputs}, {"inputs/group_size", groups()}}; }
  Axes block_shape() const { return {{"outputs", outputs}, {"bytes", blocks() ? row_bytes() : 0}}; }
  Axes panel_shape() const { return {{"panels", panels()}, {"bytes", kPanelRows * row_bytes()}}; }
};

// Of ops that move bits and compute nothing.
inline constexpr PrecisionGuarantee kPanelGuarantee{.math_precision = DType::u32,
                                                    .accumulator = DType::u32};

Status check_weight_desc(std::string_view op, const WeightDesc& d) noexcept;

template <class D, class F>
void visit_weight_fields(D& d, F&& f) {
  f("outputs", d.outputs, "rows of W");
  f("inputs", d.inputs, "columns of W, a multiple of the group or block");
  f("type", d.type, "how W is stored: f32 f16 bf16, affine, or a GGUF block type such as Q4_K");
  f("bits", d.bits, "bits per affine code: 2 3 4 5 6 8");
  f("group_size", d.group_size, "weights per affine scale and bias: 32 64 128");
  f("scale_element", d.scale_element, "dtype of affine scales and biases: f32 f16 bf16");
}

// The operands of W as stored, or as panels. `read` says which of the two are needed.
template <class Args, class F>
void visit_stored_weights(const WeightDesc& d, Args& a, bool read, F&& f, unsigned flags = 0) {
  flags |= Operand::kRowStride;
  const auto use = [&](bool needed, DType dtype, const Axes& shape, const char* with) {
    return Operand::read_if(read && needed, dtype, shape, read ? with : "layout stored", flags);
  };
  f("w", a.w,
    use(d.plain(), d.plain() ? d.plain_element() : DType::f32, d.plain_shape(),
        "type f32, f16 or bf16"));
  f("packed", a.packed, use(d.affine(), DType::u32, d.packed_shape(), "type affine"));
  f("scales", a.scales, use(d.affine(), d.scale_element, d.grid_shape(), "type affine"));
  f("biases", a.biases, use(d.affine(), d.scale_element, d.grid_shape(), "type affine"));
  f("blocks", a.blocks, use(d.blocks(), DType::u8, d.block_shape(), "a GGUF type"));
}
template <class Args, class F>
void visit_weights(const WeightDesc& d, Args& a, F&& f) {
  visit_stored_weights(d, a, d.stored(), f);
  f("panels", a.panels, Operand::read_if(!d.stored(), DType::u8, d.panel_shape(), "layout panels"));
}

}  // namespace bittern
