// What the kernels of gdn_chunk_backward share: the problem, and what they leave each other in the
// workspace.
//
// chunk_prepare (of gdn_chunk_forward) makes all that knows no state; backward_chains.cuh goes
// through the chunks, forwards for S and y and backwards for H and r, the two side by side, with
// few heads in segments; backward_chunks.cuh makes the gradients of every chunk of these, and of
// sums over its rows backward_gates.cuh those of gates and strengths.
#pragma once
#include "bittern/ops/gdn_chunk_backward.h"
#include "ops/gdn/chunk_segments.cuh"
#include "ops/gdn/chunk_tokens.cuh"

namespace bittern::chunk_backward {

using namespace chunk_forward;
using Op = GdnChunkBackward;

// What the chains write for every chunk and head and up to 128 of its values, in tiles as tensor
// cores read them.
constexpr int kSheetValues = 128;
struct Sheet {
  // S before and H after the chunk, transposed: [values, keys] in squares of 64, keys first.
  // Squares beyond key_dim or value_dim are not written.
  static constexpr int kState = 0, kGradient = 4 * kPart;
  static constexpr int kY = 8 * kPart, kR = 10 * kPart;  // [tokens, values]
  static constexpr int kBytes = 12 * kPart;
};

// The terms of d_a_log and d_dt_bias that a chunk has.
struct GateTerms {
  float a_log, dt_bias;
};

// What d_g and d_beta of a chunk are made of, by the values of a sheet. Halves are those of the two
// warpgroups.
struct RowSums {
  float k_m[2][kMostRows], q_n[2][kMostRows], k_z[2][kMostRows];  // k . M, q . N, k . Z
  // DL[i] . (k k^T)[i], and the sum over j < i of C[i][j]: of all values, with the last of them.
  float pairs[2][kMostRows], below[2][kMostRows];
  float r_v[kMostRows];
  float inner[8];  // <S, H>, of each warp
};

struct Places {
  int sheets_each;  // sheets and sums of a chunk and head
  char *records, *sheets;
  ChunkGates* gates;
  RowSums* sums;
  GateTerms* terms;
  float *states, *gradients, *transfers;  // of segments: S, H and M
};
inline std::int64_t chunks_and_heads(const Op::Desc& d) {
  return d.batch * d.state_chunks() * d.value_heads;
}
inline int sheets_of_head(const Op::Desc& d) {
  return static_cast<int>((d.value_dim + kSheetValues - 1) / kSheetValues);
}
inline std::size_t workspace_bytes(const Op::Desc& d, int segments) {
  return static_cast<std::size_t>(chunks_and_heads(d)) *
             (Record::kBytes + sizeof(ChunkGates) + sizeof(GateTerms) +
              static_cast<std::size_t>(sheets_of_head(d)) * (Sheet::kBytes + sizeof(RowSums))) +
         3 * segment_bytes(d, segments);
}
inline Places places_in(const Op::Desc& d, int segments, void* workspace) {
  const std::int64_t count = chunks_and_heads(d), sheets = count * sheets_of_head(d);
  auto* next = static_cast<char*>(workspace);
  const auto take = [&]<class T>(T*& to, std::size_t bytes) {
    to = reinterpret_cast<T*>(next);
    next += bytes;
  };
  const auto of_chunks = [&](std::size_t bytes) { return static_cast<std::size_t>(count) * bytes; };
  const auto of_sheets = [&](std::size_t bytes) {
    return static_cast<std::size_t>(sheets) * bytes;
  };
  Places p;
  p.sheets_each = sheets_of_head(d);
  take(p.records, of_chunks(Record::kBytes));
  take(p.sheets, of_sheets(Sheet::kBytes));
  take(p.states, segment_bytes(d, segments));
  take(p.gradients, segment_bytes(d, segments));
  take(p.transfers, segment_bytes(d, segments));
  take(p.gates, of_chunks(sizeof(ChunkGates)));
  take(p.sums, of_sheets(sizeof(RowSums)));
  take(p.terms, of_chunks(sizeof(GateTerms)));
  return p;
}

// e^(G[last] - G[i]).
__device__ inline float rest(const ChunkGates& g, int i) {
  constexpr int kLast = kMostRows - 1;
  return cuda::approximate_exp2((g.high[kLast] - g.high[i]) + (g.low[kLast] - g.low[i]));
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
