// What one thread of attention_backward's kernel works in, cut from its share of the workspace.
#pragma once
#include <algorithm>
#include <cstdint>

#include "bittern/ops/attention_backward.h"

namespace bittern::cpu {

struct AttentionScratch {
  // Queries and keys go in blocks of this many, counted from the start of their sequence. Rows that
  // have a number for each query of a block are this far apart.
  static constexpr std::int64_t kBlock = 64;

  // Without memory it counts the floats it needs.
  explicit AttentionScratch(const AttentionBackwardDesc& d, float* memory = nullptr)
      : stride(padded(d.dim, 16)), memory_(memory) {
    // A sequence may have all the tokens. Of these a block of queries sees what lies in its window.
    const std::int64_t tokens = padded(d.tokens, kBlock);
    const std::int64_t seen = std::min(tokens, padded(d.reach(), kBlock) + kBlock);
    k = take(tokens * stride);
    v = take(tokens * stride);
    d_k = take(tokens * stride);
    d_v = take(tokens * stride);
    x = take(seen * kBlock);
    g = take(seen * kBlock);
    u = take(d.softcap > 0 ? seen * kBlock : 0);
    a = take(kBlock * stride);
    d_out = take(kBlock * stride);
    d_q = take(kBlock * stride);
    a_transposed = take(d.dim * kBlock);
    d_out_transposed = take(d.dim * kBlock);
    most = take(kBlock);
    total = take(kBlock);
    mean = take(kBlock);
  }

  std::int64_t floats() const { return used_; }

  // Named as in the op's header. Rows of a tensor are `stride` apart.
  std::int64_t stride;
  float *k, *v, *d_k, *d_v;  // of one KV head and a whole sequence
  // A row for each key that a block of queries sees, a column for each query: x, then e, then p; g,
  // then z; u.
  float *x, *g, *u;
  float *a, *d_out, *d_q;  // of a block of queries
  float *a_transposed, *d_out_transposed;
  float *most, *total, *mean;  // for each query: m; l, then r; the sum of e g, then D

 private:
  static std::int64_t padded(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }
  float* take(std::int64_t n) {
    float* piece = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += padded(n, 16);
    return piece;
  }

  float* memory_;
  std::int64_t used_ = 0;
};

// One KV head of one sequence.
struct AttentionPart {
  std::int64_t begin, length;  // tokens
  std::int64_t kv_head;
};

}  // namespace bittern::cpu
