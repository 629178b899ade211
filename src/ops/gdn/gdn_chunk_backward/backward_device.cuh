// What the kernels of gdn_chunk_backward share: the problem, and what they leave each other in the
// workspace.
//
// chunk_prepare (of gdn_chunk_forward) makes all that knows no state; backward_chains.cuh goes
// through the chunks, forwards for S and y and backwards for H and r, the two side by side;
// backward_chunks.cuh makes the gradients of every chunk of these.
#pragma once
#include "bittern/ops/gdn_chunk_backward.h"
#include "ops/gdn/chunk_tokens.cuh"

namespace bittern::chunk_backward {

using namespace chunk_forward;
using Op = GdnChunkBackward;

// What the chains write for every chunk and head, in tiles as tensor cores read them.
struct Sheet {
  // S before and H after the chunk, transposed: [values, keys] in squares of 64, keys first.
  static constexpr int kState = 0, kGradient = 4 * kPart;
  static constexpr int kY = 8 * kPart, kR = 10 * kPart;  // [tokens, values]
  static constexpr int kBytes = 12 * kPart;
};

// The terms of d_a_log and d_dt_bias that a chunk has.
struct GateTerms {
  float a_log, dt_bias;
};

struct Places {
  char *records, *sheets;
  ChunkGates* gates;
  GateTerms* terms;
};
inline std::int64_t chunks_and_heads(const Op::Desc& d) {
  return d.batch * d.state_chunks() * d.value_heads;
}
inline std::size_t workspace_bytes(const Op::Desc& d) {
  return static_cast<std::size_t>(chunks_and_heads(d)) *
         (Record::kBytes + Sheet::kBytes + sizeof(ChunkGates) + sizeof(GateTerms));
}
inline Places places_in(const Op::Desc& d, void* workspace) {
  const std::int64_t count = chunks_and_heads(d);
  auto* const first = static_cast<char*>(workspace);
  char* const sheets = first + count * Record::kBytes;
  auto* const gates = reinterpret_cast<ChunkGates*>(sheets + count * Sheet::kBytes);
  return {first, sheets, gates, reinterpret_cast<GateTerms*>(gates + count)};
}

// The forward pass's operands; o is not touched.
inline GdnChunkForward::Args forward_args(const Op::Args& a) {
  return {.q = a.q,
          .k = a.k,
          .v = a.v,
          .g = a.g,
          .beta = a.beta,
          .a_log = a.a_log,
          .dt_bias = a.dt_bias,
          .mask = a.mask,
          .initial_state = a.initial_state,
          .cu_seqlens = a.cu_seqlens,
          .o = a.d_v};
}

}  // namespace bittern::chunk_backward
