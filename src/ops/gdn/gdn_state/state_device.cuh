// What the kernels of gdn_state share: the problem, and where a block's sequence lies.
#pragma once
#include <cstdint>

#include "bittern/ops/gdn_state.h"
#include "cuda/runtime.cuh"
#include "ops/gdn/gdn.cuh"

namespace bittern::state {

using Op = GdnState;

constexpr int kMostRows = 64;  // of a chunk

// A block does one sequence of one value head, or `parts` blocks do, each with some values.
struct Problem {
  Op::Desc d;
  cuda::ChunkSlots slots;
  const void *k, *w, *u;
  const float *g, *initial_state;  // the latter null: zeros
  void *h, *v_new;                 // null: left out
  float* final_state;              // the same
  cuda::Divisor parts, heads;
  std::int64_t items;

  Problem(const Op::Desc& desc, const Op::Args& a, std::int64_t parts_of_a_head)
      : d(desc),
        slots(d, a.cu_seqlens),
        k(a.k.data),
        w(a.w.data),
        u(a.u.data),
        g(a.g.as<float>()),
        initial_state(a.initial_state.as<float>()),
        h(a.h.data),
        v_new(a.v_new.data),
        final_state(a.final_state.as<float>()),
        parts(parts_of_a_head),
        heads(d.value_heads),
        items(d.sequence_count() * d.value_heads * parts_of_a_head) {}

  struct Item {
    std::int64_t sequence, head, key_head;
    int part;
    cuda::SequenceTokens tokens;
    std::int64_t first_state;  // the place of its first chunk in h

    __device__ int chunks(int chunk) const {
      return static_cast<int>((tokens.end - tokens.begin + chunk - 1) / chunk);
    }
  };
  // By whole warps.
  __device__ Item item(std::int64_t index) const {
    Item i;
    const std::int64_t whole = parts.divide(index);
    i.part = static_cast<int>(index - whole * parts.value());
    i.sequence = heads.divide(whole);
    i.head = whole - i.sequence * heads.value();
    i.key_head = cuda::key_head(d, i.head);
    i.tokens = slots.sequence(i.sequence);
    i.first_state = slots.first_state(i.sequence);
    return i;
  }
  // Of a sequence's state, and of the state before its chunk n; -1: there is no such place.
  __device__ std::int64_t state_at(const Item& i) const {
    return (i.sequence * d.value_heads + i.head) * d.key_dim * d.value_dim;
  }
  __device__ std::int64_t h_at(const Item& i, int n) const {
    const std::int64_t place = i.first_state + n;
    return place < slots.count ? (place * d.value_heads + i.head) * d.key_dim * d.value_dim : -1;
  }
};

}  // namespace bittern::state
