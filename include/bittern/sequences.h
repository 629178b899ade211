// Tokens in sequences, as the gated delta rule and the convolution take them.
//
// With sequences = 0 each of the `batch` rows is one sequence. With sequences = N > 0 the batch
// must be 1 and its tokens are N sequences, one after the other: sequence i is the tokens
// cu_seqlens[i] .. cu_seqlens[i+1]-1. cu_seqlens [N+1] s32 starts at 0, never decreases (a sequence
// may be empty) and ends at `tokens`. Chunks are counted from the start of their sequence, the last
// one may be shorter, and no chunk crosses into the next sequence.
//
// On the CPU any other cu_seqlens is an error. On CUDA the host does not read it. Kernels there
// clamp each bound to 0 .. tokens, and a sequence that ends before it starts is empty. So a wrong
// cu_seqlens causes no fault and no access outside the operands, but the values of the outputs are
// then not specified.
#pragma once
#include <cstdint>
#include <string_view>

#include "bittern/plan.h"

namespace bittern {

struct Sequences {
  std::int64_t batch = 1;
  std::int64_t tokens = 0;
  std::int64_t sequences = 0;
  std::int32_t chunk = 64;

  std::int64_t count() const { return sequences > 0 ? sequences : batch; }
  // An axis with an entry for each sequence.
  Axis axis() const { return {sequences > 0 ? "sequences" : "batch", count()}; }
  // Chunks of a sequence of `length` tokens.
  std::int64_t chunks(std::int64_t length) const { return (length + chunk - 1) / chunk; }
  // Chunks of a batch row: as many as there can be.
  std::int64_t most_chunks() const {
    return sequences > 0 ? tokens / chunk + sequences : chunks(tokens);
  }
  // cu_seqlens
  Operand operand() const {
    return Operand::read_if(sequences > 0, DType::s32,
                            {{"sequences+1", sequences > 0 ? sequences + 1 : 0}}, "sequences");
  }
};

Status check_sequences(std::string_view op, const Sequences& s) noexcept;
// Checks that cu_seqlens starts at 0, never decreases and ends at `tokens`.
Status check_cu_seqlens(std::string_view op, const Sequences& s,
                        const ConstView& cu_seqlens) noexcept;

}  // namespace bittern
