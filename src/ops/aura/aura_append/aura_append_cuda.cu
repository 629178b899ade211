#include <algorithm>

#include "ops/aura/aura_append/append_lanes.cuh"
#include "ops/aura/aura_append/sides.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = AuraAppend;
using namespace append;

// t = t - mean, or half of it, and then the result is true.
__device__ inline bool centre(int n, const float* mean, float* t) {
  bool overflow = false;
  for (int j = lane_index(); j < n; j += 32)
    overflow = overflow || (fabsf(t[j]) <= max_finite<float>() && isinf(t[j] - mean[j]));
  overflow = __any_sync(kAllLanes, overflow) != 0;
  for (int j = lane_index(); j < n; j += 32)
    t[j] = overflow ? t[j] / 2 - mean[j] / 2 : t[j] - mean[j];
  return overflow;
}

// A token's row of a head, by a warp. `t` holds two rows.
__device__ void append_row(const Task& p, const SideTask& side, bool is_k, std::int64_t token,
                           int head, float* t) {
  const int n = p.dim, lane = lane_index();
  const auto [coded, kept] = Slots(p, token);
  if (coded < 0 && kept < 0) return;
  const std::int64_t from = token * side.x_stride[0] + head * side.x_stride[1];
  for (int j = lane; j < n; j += 32)
    t[j] = cuda::load_element(side.x, p.element, from + j * side.x_stride[2]);
  if (is_k && p.pairs > 0) turn_row(p, token, t);
  if (kept >= 0) {
    const std::int64_t at = kept_row(p, side, kept, head);
    for (int j = lane; j < n; j += 32) {
      const float old = cuda::load_element(side.kept, p.exact, at + j);
      cuda::store_element(side.kept, p.exact, at + j, t[j]);
      t[j] = old;
    }
  } else if (p.kept > 0) {
    for (int j = lane; j < n; j += 32) t[j] = rounded(p.exact, t[j]);
  }
  if (coded >= 0) {
    const bool halved = side.mean != nullptr && centre(n, side.mean + head * n, t);
    const CodedRow to(p, side, coded, head);
    const Length length = measure_row(n, t);
    const float s = encode_row(side.coder, length, t, to.packed);
    if (lane == 0) to.store(p, side, s, halved);
  }
  __syncwarp();
}

__global__ void __launch_bounds__(32 * cuda::kWarpsOfRows)
    append_by_warps(const __grid_constant__ Task p) {
  float* const scratch = cuda::dynamic_shared<float>() + warp_index() * 2 * p.dim;
  const int warps = static_cast<int>(blockDim.x / 32);
  const std::int64_t step = std::int64_t{gridDim.x} * warps;
  for (std::int64_t i = std::int64_t{blockIdx.x} * warps + warp_index(); i < 2 * p.rows;
       i += step) {
    const bool is_k = i < p.rows;
    const std::int64_t row = is_k ? i : i - p.rows;
    const std::int64_t token = p.by_heads.divide(row);
    append_row(p, p.side[is_k ? 0 : 1], is_k, token, static_cast<int>(row - token * p.heads),
               scratch);
  }
}

SideTask task_of(const append::Side& side) {
  SideTask t{.coder = row_coder(side.coding, side.table, side.boundaries, side.codebook),
             .x = side.x.data,
             .mean = side.mean,
             .packed = side.packed.as<std::uint32_t>(),
             .scales = side.scales.data,
             .kept = side.kept.data};
  for (int i = 0; i < 3; ++i) {
    t.x_stride[i] = side.x.stride[i];
    t.kept_stride[i] = side.kept.data == nullptr ? 0 : side.kept.stride[i];
  }
  t.packed_stride = side.packed.row_stride();
  t.scale_stride = side.scales.row_stride();
  return t;
}

Status run(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace) {
  const Task p{.side = {task_of(append::k_side(d, a)), task_of(append::v_side(d, a))},
               .slots = a.slots.as<std::int32_t>(),
               .kept_slots = a.kept_slots.as<std::int32_t>(),
               .positions = a.positions.as<std::int32_t>(),
               .inverse_frequencies = a.inverse_frequencies.as<float>(),
               .rows = d.tokens * d.kv_heads,
               .slot_count = d.slots(),
               .kept_count = d.sequences * d.kept,
               .heads = static_cast<int>(d.kv_heads),
               .dim = static_cast<int>(d.dim),
               .page_size = static_cast<int>(d.page_size),
               .kept = static_cast<int>(d.kept),
               .pairs = static_cast<int>(d.rotary_dim / 2),
               .by_heads = cuda::Divisor(d.kv_heads),
               .factor = static_cast<float>(d.factor),
               .interleaved = d.interleaved,
               .f16_scale = d.f16_scale,
               .element = d.element,
               .exact = d.exact};
  const int device = a.k.device.index;
  // Rows of few tokens are spread over the multiprocessors.
  const int multiprocessors = cuda::limits(device).multiprocessors;
  const int warps = 2 * p.rows < cuda::kFewRows * multiprocessors ? 1 : cuda::kWarpsOfRows;
  const std::int64_t blocks = (p.rows + warps - 1) / warps;  // of a side
  const auto by_lanes = [&]<int kEach>(std::integral_constant<int, kEach>) {
    // So many that each fills its tables for several rows of a prompt.
    const std::int64_t most = 4 * multiprocessors;
    return cuda::launch(Op::kName, append_by_lanes<kEach>,
                        {.blocks = 2 * std::min(blocks, most),
                         .threads = 32 * warps,
                         .shared = kLaneShared<kEach>(warps)},
                        device, stream, p);
  };
  if (d.k_rotation != Rotation::dense && d.v_rotation != Rotation::dense) {
    if (d.dim == 64) return by_lanes(std::integral_constant<int, 2>());
    if (d.dim == 128) return by_lanes(std::integral_constant<int, 4>());
    if (d.dim == 256) return by_lanes(std::integral_constant<int, 8>());
  }
  const cuda::Grid grid{.blocks = 2 * blocks,
                        .threads = 32 * warps,
                        .shared = sizeof(float) * 2 * static_cast<std::size_t>(warps * p.dim)};
  return cuda::launch(Op::kName, append_by_warps, grid, device, stream, p);
}

constexpr Kernel<Op> kKernels[] = {cuda::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<AuraAppend>> aura_append_cuda() { return kKernels; }

}  // namespace bittern
