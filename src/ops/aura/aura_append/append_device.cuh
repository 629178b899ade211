// What the kernels of aura_append share: the problem, and where a token's rows go.
#pragma once
#include "bittern/ops/aura_append.h"
#include "core/rope.h"
#include "ops/aura/encode_row.cuh"

namespace bittern::append {

using namespace encode;

struct SideTask {
  RowCoder coder;
  const void* x;
  const float* mean;
  std::uint32_t* packed;
  void *scales, *kept;
  std::int64_t x_stride[3], kept_stride[3], packed_stride, scale_stride;
};

struct Task {
  SideTask side[2];  // K, V
  const std::int32_t *slots, *kept_slots, *positions;
  const float* inverse_frequencies;
  std::int64_t rows;  // of a side
  std::int64_t slot_count, kept_count;
  int heads, dim, page_size, kept, pairs;
  cuda::Divisor by_heads;
  float factor;
  bool interleaved, f16_scale;
  DType element, exact;
};

__device__ inline float rounded(DType type, float x) {
  switch (type) {
    case DType::f16: return cuda::load_math(cuda::store_math<f16>(x));
    case DType::bf16: return cuda::load_math(cuda::store_math<bf16>(x));
    default: return x;
  }
}

// A slot beyond the last is none.
struct Slots {
  int coded = -1, kept = -1;

  Slots() = default;
  __device__ Slots(const Task& p, std::int64_t token) {
    const auto find = [&](const std::int32_t* slots, std::int64_t count) {
      const std::int32_t slot = slots[token];
      return slot < count ? slot : -1;
    };
    coded = find(p.slots, p.slot_count);
    if (p.kept > 0) kept = find(p.kept_slots, p.kept_count);
  }
};

// Turns a row of K in shared memory, where every lane has written its elements.
__device__ inline void turn_row(const Task& p, std::int64_t token, float* t) {
  __syncwarp();
  for (int i = lane_index(); i < p.pairs; i += 32) {
    const RopeTurn turn = rope_turn(p.positions[token], p.inverse_frequencies[i], p.factor);
    const RopePair at = rope_pair(i, p.pairs, p.interleaved);
    const float x_a = t[at.first], x_b = t[at.second];
    t[at.first] = rounded(p.element, turn.first(x_a, x_b));
    t[at.second] = rounded(p.element, turn.second(x_a, x_b));
  }
  __syncwarp();
}

// The first element of a kept row of a head.
__device__ inline std::int64_t kept_row(const Task& p, const SideTask& side, int slot, int head) {
  return slot / p.kept * side.kept_stride[0] + head * side.kept_stride[1] +
         slot % p.kept * side.kept_stride[2];
}

// A coded row of a head.
struct CodedRow {
  std::uint32_t* packed;
  std::int64_t scale;

  __device__ CodedRow(const Task& p, const SideTask& side, int slot, int head) {
    const std::int64_t page = slot / p.page_size;
    const std::int64_t row = std::int64_t{head} * p.page_size + slot % p.page_size;
    packed = side.packed + page * side.packed_stride + row * side.coder.words;
    scale = page * side.scale_stride + row;
  }
  // By one lane.
  __device__ void store(const Task& p, const SideTask& side, float s, bool halved) const {
    s = limited(s, max_finite<float>());
    if (halved) s = limited(2 * s, max_finite<float>());
    store_scale(side.scales, p.f16_scale, scale, s);
  }
};

}  // namespace bittern::append
