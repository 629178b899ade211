// What one thread of a gated delta rule's kernel works in: chunks of up to 64 tokens, keys and
// values of up to 256 elements.
#pragma once
#include <cstdint>

namespace bittern::cpu::gdn {

inline constexpr std::int64_t kRows = 64, kColumns = 256;
using Row = float[kRows];              // a number per token
using Matrix = float[kRows * kRows];   // a number per pair of tokens; rows are kRows apart
using Tile = float[kRows * kColumns];  // a vector per token, or the transpose
using State = float[kColumns * kColumns];

struct alignas(64) RecomputeScratch {
  Matrix a;
  Tile scaled, product;
  Row beta, decay;
};

struct alignas(64) KktScratch {
  Tile k, k_transposed;
  Matrix kk, l;
  Row beta, g;
};

struct alignas(64) SolveScratch {
  Matrix l, a;
};

struct alignas(64) StateScratch {
  State state, rounded;
  Tile k, v, product;
  Row g, decay;
};

struct alignas(64) OutputScratch {
  State state;
  Tile q, k_transposed, v, o;
  Matrix qk, p;
  Row g, decay;
};

// Value heads of one key head that go through the chunks together.
inline constexpr std::int64_t kShared = 4;

struct alignas(64) ForwardScratch {
  State state[kShared];
  float keys_queries[2 * kRows * kColumns];  // the queries right after the last key
  float products[2 * kRows * kColumns];      // of these with the state
  Tile k_transposed, v;
  Matrix kk, qk, l, p;
  Row sum, decay, beta;
};

// Gradients are named as in bittern/ops/gdn_chunk_backward.h.
struct alignas(64) BackwardScratch {
  State state, grad, grad_transposed;
  float keys_queries[2 * kRows * kColumns];  // the queries right after the last key
  float gradients[2 * kRows * kColumns];     // r, and d_o right after it
  float projected[2 * kRows * kColumns];     // M and N: these times the state
  Tile transposed, v, z, dq, dk;
  Matrix kk, qk, e, l, p, dl, dp, x, w;
  Row sum, decay, rest, beta, b, columns, dbeta, ones;
};

// What a thread keeps of every chunk of a head: states before it, transposed, and y; and the sums
// over value heads of dq and dk.
struct History {
  std::int64_t state_size;  // from one state to the next
  float *states, *y, *dq, *dk, *dg;
};

struct GateSums {
  float a_log, dt_bias;
};

}  // namespace bittern::cpu::gdn
