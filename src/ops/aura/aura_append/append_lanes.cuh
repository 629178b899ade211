// Rows of 64, 128 or 256 elements whose rotation is no matrix, a warp to each, in registers: lane l
// has the elements l + 32 i.
#pragma once
#include "ops/aura/aura_append/append_device.cuh"

namespace bittern::append {

template <int kEach>
using Lanes = float[kEach];

template <int kEach>
__device__ void load_lanes(const void* from, DType type, std::int64_t at, std::int64_t step,
                           Lanes<kEach>& x) {
  const auto load = [&](const auto* values) {
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      x[i] = cuda::load_math(values[at + (lane_index() + 32 * i) * step]);
  };
  if (type == DType::f32) load(static_cast<const float*>(from));
  if (type == DType::f16) load(static_cast<const f16*>(from));
  if (type == DType::bf16) load(static_cast<const bf16*>(from));
}

// dot() of two rows.
template <int kEach>
__device__ float dot_lanes(const Lanes<kEach>& a, const Lanes<kEach>& b) {
  float chain = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) chain = fmaf(a[i], b[i], chain);
  return cuda::sum_across(chain, 16);
}

// As measure_row.
template <int kEach>
__device__ Length measure_lanes(Lanes<kEach>& x) {
  float squares = dot_lanes<kEach>(x, x);
  AuraRange range{1, 1};
  bool finite = true;
  if (!ordinary(squares)) {
    std::uint32_t most = 0;
#pragma unroll
    for (const float v : x) most = max(most, __float_as_uint(fabsf(v)));
    most = __reduce_max_sync(kAllLanes, most);
    finite = most < kAuraNotFinite;
    range = aura_range(most);
#pragma unroll
    for (float& v : x) v *= range.down;
    squares = dot_lanes<kEach>(x, x);
  }
  const float norm = sqrtf(squares);
  return {fminf(norm * range.up, max_finite<float>()), norm > 0 ? 1 / norm : 0.0f, finite};
}

// Step 2 of aura_encode; `sign` are the rotation's.
template <int kEach>
__device__ void rotate_lanes(const RowRotation& rotation, const Lanes<kEach>& sign, float inv,
                             Lanes<kEach>& x) {
  if (rotation.kind == Rotation::identity) {
#pragma unroll
    for (float& v : x) v *= inv;
    return;
  }
  const float scale = inv * rotation.scale;
#pragma unroll
  for (int i = 0; i < kEach; ++i) x[i] *= sign[i] * scale;
  cuda::butterfly_lanes(x);
}

// Steps 3 to 5: the codes of r to `packed`; gives s, before it is limited. The tables are in shared
// memory.
template <int kEach>
__device__ float quantise_lanes(const RowCoder& p, const float* boundaries, const float* levels,
                                Length length, const Lanes<kEach>& r, std::uint32_t* packed) {
  unsigned code[kEach] = {};
  for (unsigned step = length.finite ? 1u << (p.bits - 1) : 0u; step > 0; step /= 2) {
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (r[i] > boundaries[code[i] + step - 1]) code[i] += step;
  }
  Lanes<kEach> level, eights;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    level[i] = levels[code[i]];
    eights[i] = level[i] * level[i];
#pragma unroll
    for (int step = 1; step < 8; step *= 2) eights[i] += cuda::across(eights[i], step);
  }
  const float cc =
      cuda::sum_across(cuda::halving_sum<0, 1, kEach>([&](int i) { return eights[i]; }), 16, 8);
  const float rc = p.needs_products() ? dot_lanes<kEach>(r, level) + 0.0f : 0.0f;
  // Eight neighbours' codes are `bits` bytes: half of them is joined at a time, and fits a word.
  const int place = lane_index() % 8, four = 4 * p.bits;
  auto* const bytes = reinterpret_cast<std::uint8_t*>(packed);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    unsigned half = code[i] << place % 4 * p.bits;
    half |= __shfl_xor_sync(kAllLanes, half, 1);
    half |= __shfl_xor_sync(kAllLanes, half, 2);
    const unsigned other = __shfl_xor_sync(kAllLanes, half, 4);
    const auto low = static_cast<std::uint64_t>(place < 4 ? half : other);
    const auto high = static_cast<std::uint64_t>(place < 4 ? other : half);
    if (place < p.bits) {
      bytes[(4 * i + lane_index() / 8) * p.bits + place] =
          static_cast<std::uint8_t>((low | high << four) >> 8 * place);
    }
  }
  const float s = stored_scale(p.rule, length.norm, cc, rc);
  return length.finite ? s : std::numeric_limits<float>::quiet_NaN();
}

// As centre.
template <int kEach>
__device__ bool centre_lanes(const float* mean, Lanes<kEach>& x) {
  Lanes<kEach> m;
  load_lanes<kEach>(mean, DType::f32, 0, 1, m);
  bool overflow = false;
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    overflow = overflow || (fabsf(x[i]) <= max_finite<float>() && isinf(x[i] - m[i]));
  overflow = __any_sync(kAllLanes, overflow) != 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) x[i] = overflow ? x[i] / 2 - m[i] / 2 : x[i] - m[i];
  return overflow;
}

// A row on its way: loaded while the one before is worked on.
template <int kEach>
struct Fetched {
  std::int64_t token = 0;
  int head = 0;
  Slots slots;
  Lanes<kEach> x = {};

  __device__ Fetched(const Task& p, const SideTask& side, std::int64_t row) {
    if (row >= p.rows) return;
    token = p.by_heads.divide(row);
    head = static_cast<int>(row - token * p.heads);
    load_lanes<kEach>(side.x, p.element, token * side.x_stride[0] + head * side.x_stride[1],
                      side.x_stride[2], x);
    slots = Slots(p, token);
  }
};

// Blocks of even numbers have rows of K, others those of V. Shared memory: the side's boundaries
// and levels, and a row for each warp.
template <int kEach>
constexpr std::size_t kLaneShared(int warps) {
  return sizeof(float) * static_cast<std::size_t>(2 * 256 + warps * 32 * kEach);
}

template <int kEach>
__global__ void __launch_bounds__(32 * cuda::kWarpsOfRows)
    append_by_lanes(const __grid_constant__ Task p) {
  const bool is_k = blockIdx.x % 2 == 0;
  const SideTask& side = p.side[is_k ? 0 : 1];
  const int warps = static_cast<int>(blockDim.x / 32);
  const std::int64_t step = std::int64_t{gridDim.x / 2} * warps;
  std::int64_t row = std::int64_t{blockIdx.x / 2} * warps + warp_index();
  Fetched<kEach> now(p, side, row);
  float* const boundaries = cuda::dynamic_shared<float>();
  float* const levels = boundaries + 256;
  float* const t = levels + 256 + warp_index() * 32 * kEach;
  for (int i = static_cast<int>(threadIdx.x); i < 1 << side.coder.bits;
       i += static_cast<int>(blockDim.x)) {
    levels[i] = side.coder.codebook[i];
    if (i + 1 < 1 << side.coder.bits) boundaries[i] = side.coder.boundaries[i];
  }
  Lanes<kEach> sign = {};
  if (side.coder.rotation.kind == Rotation::hadamard)
    load_lanes<kEach>(side.coder.rotation.table, DType::f32, 0, 1, sign);
  __syncthreads();
  for (; row < p.rows; row += step) {
    const Fetched<kEach> next(p, side, row + step);
    const auto [coded, kept] = now.slots;
    Lanes<kEach>& x = now.x;
    if (is_k && p.pairs > 0 && (coded >= 0 || kept >= 0)) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) t[lane_index() + 32 * i] = x[i];
      turn_row(p, now.token, t);
#pragma unroll
      for (int i = 0; i < kEach; ++i) x[i] = t[lane_index() + 32 * i];
    }
    if (kept >= 0) {
      const std::int64_t at = kept_row(p, side, kept, now.head);
      Lanes<kEach> old;
      load_lanes<kEach>(side.kept, p.exact, at, 1, old);
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        cuda::store_element(side.kept, p.exact, at + lane_index() + 32 * i, x[i]);
        x[i] = old[i];
      }
    } else if (p.kept > 0) {
#pragma unroll
      for (float& v : x) v = rounded(p.exact, v);
    }
    if (coded >= 0) {
      const bool halved =
          side.mean != nullptr && centre_lanes<kEach>(side.mean + now.head * 32 * kEach, x);
      const CodedRow to(p, side, coded, now.head);
      const Length length = measure_lanes<kEach>(x);
      rotate_lanes<kEach>(side.coder.rotation, sign, length.inv, x);
      const float s = quantise_lanes<kEach>(side.coder, boundaries, levels, length, x, to.packed);
      if (lane_index() == 0) to.store(p, side, s, halved);
    }
    now = next;
  }
}

}  // namespace bittern::append
