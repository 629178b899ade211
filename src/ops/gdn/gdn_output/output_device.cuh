// What the kernels of gdn_output share: the problem.
#pragma once
#include <cstdint>

#include "bittern/ops/gdn_output.h"
#include "cuda/runtime.cuh"
#include "ops/gdn/gdn.cuh"

namespace bittern::output {

using Op = GdnOutput;

constexpr int kMostRows = 64;  // of a chunk

// A block does one chunk of one value head, or `parts` blocks do, each with some values. Those that
// share a key head are neighbours: what one reads of q and k, the others find in L2.
struct Problem {
  Op::Desc d;
  cuda::ChunkSlots slots;
  const void *q, *k, *v_new, *h;
  const float* g;
  void* o;
  float scale;
  cuda::Divisor heads, sharing;  // value heads, and those of a key head
  cuda::Divisor parts;
  std::int64_t items;

  Problem(const Op::Desc& desc, const Op::Args& a, std::int64_t parts_of_a_head = 1)
      : d(desc),
        slots(d, a.cu_seqlens),
        q(a.q.data),
        k(a.k.data),
        v_new(a.v_new.data),
        h(a.h.data),
        g(a.g.as<float>()),
        o(a.o.data),
        scale(d.query_scale()),
        heads(d.value_heads),
        sharing(d.value_heads / d.key_heads),
        parts(parts_of_a_head),
        items(slots.count * d.value_heads * parts_of_a_head) {}

  struct Item {
    cuda::ChunkTokens chunk;        // no rows: there is nothing to do
    std::int64_t key_at, state_at;  // elements to its first key, and to its state
    std::int64_t first;             // its first row, among the rows of all heads
    int part;
  };
  // By whole warps.
  __device__ Item item(std::int64_t index) const {
    const std::int64_t whole = parts.divide(index);
    const std::int64_t slot = heads.divide(whole), turn = whole - slot * heads.value();
    const std::int64_t key_head = sharing.divide(turn);
    const std::int64_t head = cuda::value_head(d, key_head, turn - key_head * sharing.value());
    Item i;
    i.part = static_cast<int>(index - whole * parts.value());
    i.chunk = slots.at(slot);
    const std::int64_t place = slots.state_of(slot);
    if (place < 0) i.chunk.rows = 0;
    i.key_at = (i.chunk.begin * d.key_heads + key_head) * d.key_dim;
    i.state_at = (place * d.value_heads + head) * d.key_dim * d.value_dim;
    i.first = i.chunk.begin * d.value_heads + head;
    return i;
  }
};

}  // namespace bittern::output
