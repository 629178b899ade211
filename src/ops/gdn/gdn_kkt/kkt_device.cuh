// What the kernels of gdn_kkt share: the problem.
#pragma once
#include <cstdint>

#include "bittern/ops/gdn_kkt.h"
#include "cuda/runtime.cuh"
#include "ops/gdn/gdn.cuh"

namespace bittern::kkt {

using Op = GdnKkt;

constexpr int kMostRows = 64;  // of a chunk

// A block has a chunk of one key head, and all of its value heads.
struct Problem {
  Op::Desc d;
  cuda::ChunkSlots slots;
  const void* k;
  const float *beta, *g;
  float* l;
  cuda::Divisor key_heads;
  std::int64_t items;

  Problem(const Op::Desc& desc, const Op::Args& a)
      : d(desc),
        slots(d, a.cu_seqlens),
        k(a.k.data),
        beta(a.beta.as<float>()),
        g(a.g.as<float>()),
        l(a.l.as<float>()),
        key_heads(d.key_heads),
        items(slots.count * d.key_heads) {}

  struct Item {
    cuda::ChunkTokens chunk;
    std::int64_t key_head;
  };
  __device__ Item item(std::int64_t index) const {
    const std::int64_t slot = key_heads.divide(index);
    return {slots.at(slot), index - slot * d.key_heads};
  }
  // Elements to the first row of the keys.
  __device__ std::int64_t keys_at(const Item& item) const {
    return (item.chunk.begin * d.key_heads + item.key_head) * d.key_dim;
  }
  // Gates to the first row of the i-th value head.
  __device__ std::int64_t gates_at(const Item& item, std::int64_t i) const {
    return item.chunk.begin * d.value_heads + cuda::value_head(d, item.key_head, i);
  }
};

}  // namespace bittern::kkt
