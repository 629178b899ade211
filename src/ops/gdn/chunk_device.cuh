// What the kernels of the forward pass share: the problem, and where a block's sequence lies.
#pragma once
#include <cstdint>

#include "bittern/ops/gdn_chunk_forward.h"
#include "cuda/runtime.cuh"
#include "ops/gdn/gdn.cuh"
#include "ops/gdn/gdn.h"

namespace bittern::chunk_forward {

using Op = GdnChunkForward;
using cuda::Divisor;
using cuda::TokenStrides;

constexpr int kMostRows = 64;  // of a chunk

// Elements to the next sequence, head, key and value of a state.
struct StateStrides {
  std::int64_t sequence, head, key, value;
  template <class View>
  StateStrides(const Op::Desc& d, const View& v)
      : sequence(v.stride[0]),
        head(v.stride[1]),
        key(d.state_layout == StateLayout::key_value ? v.stride[2] : 1),
        value(d.state_layout == StateLayout::key_value ? 1 : v.stride[2]) {}
  __device__ std::int64_t at(std::int64_t n, std::int64_t h) const {
    return n * sequence + h * head;
  }
};

// A block does one sequence of one value head, or `parts` blocks do, each with some values.
struct Problem : cuda::TokenOperands {
  Op::Desc d;
  const std::uint8_t* mask;        // null: none
  const float* initial_state;      // null: zeros
  const std::int32_t* cu_seqlens;  // null: each batch row is a sequence
  float* final_state;              // null: left out
  StateStrides initial_stride, final_stride;
  float scale;
  Divisor parts, heads;
  std::int64_t items;

  Problem(const Op::Desc& desc, const Op::Args& a, std::int64_t parts_of_a_head)
      : TokenOperands(desc, a),
        d(desc),
        mask(a.mask.as<std::uint8_t>()),
        initial_state(a.initial_state.as<float>()),
        cu_seqlens(d.sequences > 0 ? a.cu_seqlens.as<std::int32_t>() : nullptr),
        final_state(a.final_state.as<float>()),
        initial_stride(d, a.initial_state),
        final_stride(d, a.final_state),
        scale(d.query_scale()),
        parts(parts_of_a_head),
        heads(d.value_heads),
        items(d.sequence_count() * d.value_heads * parts_of_a_head) {}

  struct Item {
    std::int64_t sequence, head, key_head;
    int part;
    std::int64_t row, begin, end;  // its batch row, and its tokens there
  };
  __device__ Item item(std::int64_t index) const {
    Item i;
    const std::int64_t whole = parts.divide(index);
    i.part = static_cast<int>(index - whole * parts.value());
    i.sequence = heads.divide(whole);
    i.head = whole - i.sequence * heads.value();
    i.key_head = key_head(i.head);
    i.row = cu_seqlens != nullptr ? 0 : i.sequence;
    // Whatever cu_seqlens holds, no token outside the tensor is touched.
    const auto bound = [&](std::int64_t n) {
      const std::int64_t at = cu_seqlens[n];
      return at < 0 ? 0 : at < d.tokens ? at : d.tokens;
    };
    i.begin = cu_seqlens != nullptr ? bound(i.sequence) : 0;
    i.end = cu_seqlens != nullptr ? bound(i.sequence + 1) : d.tokens;
    return i;
  }
  // The slot of a packed sequence's first chunk (cuda::ChunkSlots).
  __device__ std::int64_t first_slot(const Item& i) const { return i.begin / d.chunk + i.sequence; }
  __device__ bool masked(const Item& i, std::int64_t token) const {
    return mask != nullptr && mask[i.row * d.tokens + token] == 0;
  }
  // As `ref` reads them; masked tokens have neither.
  __device__ float log_decay(const Item& i, std::int64_t token) const {
    const float raw = g[g_stride.at(i.row, token, i.head)];
    return d.gate ? gdn_log_decay(raw, a_log[i.head], dt_bias[i.head]) : raw;
  }
  __device__ float strength(const Item& i, std::int64_t token) const {
    return gdn_strength(d, beta[beta_stride.at(i.row, token, i.head)]);
  }
};

}  // namespace bittern::chunk_forward
