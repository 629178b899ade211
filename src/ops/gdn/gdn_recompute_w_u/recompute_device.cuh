// What the kernels of gdn_recompute_w_u share: the problem, and where a block's chunk and head lie.
#pragma once
#include <cstdint>

#include "bittern/ops/gdn_recompute_w_u.h"
#include "cuda/runtime.cuh"
#include "ops/gdn/gdn.cuh"

namespace bittern::recompute {

using Op = GdnRecomputeWU;
using cuda::ChunkTokens;
using cuda::Divisor;

constexpr int kThreads = 128;
constexpr int kMostRows = 64;  // of a chunk

// A block does one chunk of one value head. Heads that share a key head are neighbours: what one
// reads of k, the others find in L2.
struct Problem {
  cuda::ChunkSlots slots;
  const void *k, *v, *a;
  const float *beta, *g;
  void *w, *u;  // null: left out
  std::int64_t key_heads, value_heads;
  int key_dim, value_dim;
  bool tiled, lower;
  Divisor sharing, heads;  // value heads of a key head, and all
  std::int64_t items;

  Problem(const Op::Desc& d, const Op::Args& args)
      : slots(d, args.cu_seqlens),
        k(args.k.data),
        v(args.v.data),
        a(args.a.data),
        beta(args.beta.as<float>()),
        g(args.g.as<float>()),
        w(args.w.data),
        u(args.u.data),
        key_heads(d.key_heads),
        value_heads(d.value_heads),
        key_dim(static_cast<int>(d.key_dim)),
        value_dim(static_cast<int>(d.value_dim)),
        tiled(d.head_map == HeadMap::tiled),
        lower(d.lower_triangular),
        sharing(d.value_heads / d.key_heads),
        heads(d.value_heads),
        items(slots.count * d.value_heads) {}

  struct Item {
    ChunkTokens chunk;
    std::int64_t key_row, value_row;  // of the first token, among the rows of all heads
  };
  // Index: std::int64_t, or std::uint32_t, whose divisions are cheaper.
  template <class Index>
  __device__ Item item(Index index) const {
    const auto slot = static_cast<Index>(heads.divide(index));
    const auto turn = static_cast<Index>(index - slot * static_cast<Index>(value_heads));
    const auto key_head = static_cast<Index>(sharing.divide(turn));
    const std::int64_t i = turn - key_head * sharing.value();  // as in GdnDesc::value_head
    const ChunkTokens chunk = slots.at(slot);
    return {chunk, chunk.begin * key_heads + key_head,
            chunk.begin * value_heads + (tiled ? key_head + i * key_heads : turn)};
  }
  // How many columns of A's row i count, in a chunk of `rows`.
  __device__ int terms(int i, int rows) const { return i >= rows ? 0 : lower ? i + 1 : rows; }
};

// X((x * beta) * decay); with decay 1, X(x * beta).
template <class X>
__device__ float scaled(X x, float beta, float decay) {
  return cuda::load_math(cuda::store_math<X>(cuda::load_math(x) * beta * decay));
}

}  // namespace bittern::recompute
