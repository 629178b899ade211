// The problem causal_conv1d and its backward share.
//
//   x, y            [batch, tokens, channels]
//   weight          [channels, width]              bias [channels]
//   a state         [sequence_count(), channels, width - 1]: a sequence's last inputs, oldest first
//   mask            [batch, tokens] u8
//
// all but the mask of dtype `element`. x, y and their gradients may have any strides but on the
// last axis, states on every axis. Sequences are those of gdn_desc.h: the batch's rows, or with
// sequences > 0 runs of one row's tokens, given by cu_seqlens. They may be empty.
#pragma once
#include "bittern/sequences.h"

namespace bittern {

struct CausalConvDesc {
  std::int64_t batch = 1;
  std::int64_t tokens = 0;
  std::int64_t channels = 0;
  std::int32_t width = 4;  // 2..4
  std::int64_t sequences = 0;
  DType element = DType::f32;  // f32 f16 bf16
  bool silu = true;
  bool operator==(const CausalConvDesc&) const = default;

  Sequences rows() const { return {batch, tokens, sequences}; }
  std::int64_t sequence_count() const { return rows().count(); }
  // Blocks there can be at most.
  std::int64_t blocks() const {
    return sequences > 0 ? rows().most_chunks() : batch * rows().most_chunks();
  }
  Axes tensor_shape() const {
    return {{"batch", batch}, {"tokens", tokens}, {"channels", channels}};
  }
  Axes weight_shape() const { return {{"channels", channels}, {"width", width}}; }
  Axes bias_shape() const { return {{"channels", channels}}; }
  Axes state_shape() const {
    return {rows().axis(), {"channels", channels}, {"width-1", width - 1}};
  }
  Operand state_operand() const {
    return {element, state_shape(), Operand::kOptional | Operand::kScattered};
  }
  Axes mask_shape() const { return {{"batch", batch}, {"tokens", tokens}}; }
};

Status check_causal_conv_desc(std::string_view op, const CausalConvDesc& d) noexcept;

template <class D, class F>
void visit_causal_conv_fields(D& d, F&& f) {
  f("batch", d.batch, "rows of tokens; 1 with sequences");
  f("tokens", d.tokens, "tokens per row");
  f("channels", d.channels, "number of channels");
  f("width", d.width, "inputs per output, 2..4");
  f("sequences", d.sequences, "number of sequences packed in the tokens (0: each row is one)");
  f("element", d.element, "dtype of the tensors: f32 f16 bf16");
  f("silu", d.silu, "apply silu to the output");
}

}  // namespace bittern
