// What the kernel of attention_backward works on, and what each of its threads works in.
#pragma once
#include <algorithm>
#include <cstdint>

#include "bittern/ops/attention_backward.h"

namespace bittern::cpu {

// Queries and keys go in blocks of this many, counted from the start of their sequence. Rows that
// have a number for each query of a block are this far apart.
inline constexpr std::int64_t kAttentionBlock = 64;

// One KV head of one sequence.
struct AttentionPart {
  std::int64_t begin, length;  // tokens
  std::int64_t kv_head;
  std::int64_t first_block;  // how many blocks the sequences before have
};

// For each query of a block: m; l, then r; the sum of e g, then D.
struct AttentionSums {
  static constexpr std::int64_t kFloats = 3 * kAttentionBlock;
  explicit AttentionSums(float* at)
      : most(at), total(at + kAttentionBlock), mean(at + 2 * kAttentionBlock) {}
  float *most, *total, *mean;
};

// A thread's share of the workspace. Names are those of the op's header; rows of a tensor are
// `stride` apart.
class AttentionScratch {
 public:
  // Without memory it counts the floats it needs.
  explicit AttentionScratch(const AttentionBackwardDesc& d, float* memory = nullptr)
      : stride(padded(d.dim, 16)), memory_(memory) {
    // A sequence may have all the tokens. Of these a block of queries sees what is in its window.
    const std::int64_t tokens = padded(d.tokens, kAttentionBlock);
    const std::int64_t seen =
        std::min(tokens, padded(d.reach(), kAttentionBlock) + kAttentionBlock);
    k = take(tokens * stride);
    v = take(tokens * stride);
    d_k = take(tokens * stride);
    d_v = take(tokens * stride);
    x = take(seen * kAttentionBlock);
    g = take(seen * kAttentionBlock);
    u = take(d.softcap > 0 ? seen * kAttentionBlock : 0);
    a = take(kAttentionBlock * stride);
    d_out = take(kAttentionBlock * stride);
    d_q = take(kAttentionBlock * stride);
    a_transposed = take(d.dim * kAttentionBlock);
    d_out_transposed = take(d.dim * kAttentionBlock);
    sums = take(AttentionSums::kFloats);
  }

  std::int64_t floats() const { return used_; }

  std::int64_t stride;
  float *k, *v, *d_k, *d_v;  // of one KV head and a whole sequence
  // A row for each key that a block of queries sees, a column for each query: x, then e, then p; g,
  // then z; u.
  float *x, *g, *u;
  float *a, *d_out, *d_q;  // of a block of queries
  float *a_transposed, *d_out_transposed;
  float* sums;

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

}  // namespace bittern::cpu
