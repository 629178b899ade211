// What the gated delta rule's kernels share: where chunks and sequences lie, found on the device
// (the host cannot read cu_seqlens), strides, and dot products.
#pragma once
#include <cmath>
#include <cstdint>

#include "bittern/gdn_desc.h"
#include "core/dot.h"
#include "cuda/device.cuh"

namespace bittern::cuda {

struct ChunkTokens {
  std::int64_t begin;  // its first token, counted over the whole tensor
  int rows;            // its tokens; 0: there is no such chunk
};

struct SequenceTokens {
  std::int64_t begin, end;  // counted over the whole tensor
};

// Every chunk has a slot, and some slots have none. Of packed sequences, sequence s owns the slots
//
//   cu[s] / chunk + s  ..  cu[s+1] / chunk + s
//
// which are at least its ceil((cu[s+1] - cu[s]) / chunk), rise strictly with s and number
// GdnDesc::state_chunks() in all: so a search over cu_seqlens finds a slot's sequence.
struct ChunkSlots {
  const std::int32_t* cu_seqlens;
  std::int64_t sequences;  // packed; 0: each batch row is one
  std::int64_t tokens;     // of a batch row
  int chunk;
  Divisor per_row;
  std::int64_t count;

  ChunkSlots(const GdnDesc& d, const ConstView& cu)
      : cu_seqlens(cu.as<std::int32_t>()),
        sequences(d.sequences),
        tokens(d.tokens),
        chunk(d.chunk),
        per_row(d.state_chunks()),
        count(d.batch * d.state_chunks()) {}

  __device__ std::int64_t first_slot(std::int64_t s) const { return cu_seqlens[s] / chunk + s; }
  // Of packed sequences, the last one whose first slot is not after this one.
  __device__ std::int64_t sequence_of(std::int64_t slot) const {
    std::int64_t s = 0;
    for (std::int64_t past = sequences; past - s > 1;) {
      const std::int64_t middle = s + (past - s) / 2;
      (first_slot(middle) <= slot ? s : past) = middle;
    }
    return s;
  }
  __device__ ChunkTokens at(std::int64_t slot) const {
    const std::int64_t row = per_row.divide(slot);
    return of_row(row, slot - row * per_row.value());
  }
  // Slot `slot` of those of a batch row. There is one row of packed sequences.
  __device__ ChunkTokens of_row(std::int64_t row, std::int64_t slot) const {
    std::int64_t begin, end;
    if (sequences == 0) {
      begin = row * tokens + slot * chunk;
      end = (row + 1) * tokens;
    } else {
      const std::int64_t s = sequence_of(slot);
      begin = cu_seqlens[s] + (slot - first_slot(s)) * chunk;
      end = cu_seqlens[s + 1];
      // Whatever cu_seqlens holds, no token outside the tensor is touched.
      if (begin < 0) return {0, 0};
      if (end > tokens) end = tokens;
    }
    if (begin >= end) return {begin, 0};
    return {begin, end - begin < chunk ? static_cast<int>(end - begin) : chunk};
  }

  // The tokens of a sequence. Whatever cu_seqlens holds, they are inside the tensor.
  __device__ SequenceTokens sequence(std::int64_t s) const {
    if (sequences == 0) return {s * tokens, (s + 1) * tokens};
    const auto bound = [&](std::int64_t n) {
      const std::int64_t at = cu_seqlens[n];
      return at < 0 ? 0 : at < tokens ? at : tokens;
    };
    const std::int64_t begin = bound(s), end = bound(s + 1);
    return {begin, end < begin ? begin : end};
  }
  // The place in h of a sequence's first chunk: there is no gap between the chunks of sequences
  // there. By a whole warp, all of which get it. With a wrong cu_seqlens it may be outside of h.
  __device__ std::int64_t first_state(std::int64_t s) const {
    if (sequences == 0) return s * per_row.value();
    std::int64_t before = 0;
    for (std::int64_t n = static_cast<int>(threadIdx.x) % 32; n < s; n += 32) {
      const SequenceTokens of = sequence(n);
      before += (of.end - of.begin + chunk - 1) / chunk;
    }
    for (int apart = 16; apart > 0; apart /= 2) before += __shfl_xor_sync(~0u, before, apart);
    return before;
  }
  // The place in h of a slot's chunk, likewise; -1 if it is outside.
  __device__ std::int64_t state_of(std::int64_t slot) const {
    if (sequences == 0) return slot;
    const std::int64_t s = sequence_of(slot), place = first_state(s) + slot - first_slot(s);
    return place < count ? place : -1;
  }
};

// GdnDesc::key_head and value_head.
__device__ inline std::int64_t key_head(const GdnDesc& d, std::int64_t value_head) {
  return d.head_map == HeadMap::tiled ? value_head % d.key_heads
                                      : value_head / (d.value_heads / d.key_heads);
}
__device__ inline std::int64_t value_head(const GdnDesc& d, std::int64_t key_head, std::int64_t i) {
  return d.head_map == HeadMap::tiled ? key_head + i * d.key_heads
                                      : key_head * (d.value_heads / d.key_heads) + i;
}

// Elements to the next batch row (or sequence), token and head.
struct TokenStrides {
  std::int64_t row, token, head;
  template <class View>
  explicit TokenStrides(const View& v) : row(v.stride[0]), token(v.stride[1]), head(v.stride[2]) {}
  __device__ std::int64_t at(std::int64_t r, std::int64_t t, std::int64_t h) const {
    return r * row + t * token + h * head;
  }
};

// What the kernels for whole chunks and for single tokens are given alike, and which key head a
// value head has.
struct TokenOperands {
  const void *q, *k, *v;
  const float *g, *beta, *a_log, *dt_bias;
  void* o;
  TokenStrides q_stride, k_stride, v_stride, g_stride, beta_stride, o_stride;
  Divisor turns;  // value heads of a key head; tiled, key heads
  bool tiled;

  template <class Desc, class Args>
  TokenOperands(const Desc& d, const Args& a)
      : q(a.q.data),
        k(a.k.data),
        v(a.v.data),
        g(a.g.template as<float>()),
        beta(a.beta.template as<float>()),
        a_log(a.a_log.template as<float>()),
        dt_bias(a.dt_bias.template as<float>()),
        o(a.o.data),
        q_stride(a.q),
        k_stride(a.k),
        v_stride(a.v),
        g_stride(a.g),
        beta_stride(a.beta),
        o_stride(a.o),
        turns(d.head_map == HeadMap::tiled ? d.key_heads : d.value_heads / d.key_heads),
        tiled(d.head_map == HeadMap::tiled) {}

  __device__ std::int64_t key_head(std::int64_t head) const {
    const std::int64_t turn = turns.divide(head);
    return tiled ? head - turn * turns.value() : turn;
  }
};

// core/dot.h by each half of a warp: lane l has sum l % 16, and all get the result.
template <class Left, class Right>
__device__ float strided_dot(int n, Left&& left, Right&& right) {
  float sum = 0;
  for (int i = static_cast<int>(threadIdx.x) % kDotLanes; i < n; i += kDotLanes)
    sum = std::fma(left(i), right(i), sum);
  for (int stride = kDotLanes / 2; stride > 0; stride /= 2)
    sum += __shfl_xor_sync(~0u, sum, stride);
  return sum;
}

}  // namespace bittern::cuda
