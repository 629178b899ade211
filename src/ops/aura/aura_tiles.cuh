// What kernels of tiles need around them: copies of packed rows, and which warp takes which tile.
#pragma once
#include <algorithm>
#include <cstdint>

#include "cuda/ptx.cuh"
#include "cuda/runtime.cuh"
#include "ops/aura/aura_lanes.cuh"

namespace bittern::cuda {

// ---- packed rows ----

// v / d for v below 2^16 and d above 0.
__device__ inline int small_quotient(int v, int d, unsigned reciprocal) {
  return d == 1 ? v : static_cast<int>(__umulhi(static_cast<unsigned>(v), reciprocal));
}

// A warp moves `rows` rows of `words` words between shared memory, a multiple of 16 bytes apart,
// and device memory, in whole 16 bytes where those are aligned.
template <class Move4, class Move1>
__device__ inline void for_packed(const std::uint32_t* device, std::int64_t stride, int words,
                                  int rows, const Move4& move4, const Move1& move1) {
  const bool wide =
      words % 4 == 0 && stride % 4 == 0 && reinterpret_cast<std::uintptr_t>(device) % 16 == 0;
  const int units = wide ? words / 4 : words;
  const unsigned reciprocal = units == 1 ? 0u : 0xffffffffu / static_cast<unsigned>(units) + 1u;
  for (int v = lane_index(); v < rows * units; v += 32) {
    const int row = small_quotient(v, units, reciprocal), unit = v - row * units;
    if (wide) {
      move4(row, 4 * unit);
    } else {
      move1(row, unit);
    }
  }
}
__device__ inline void copy_rows_out(const char* shared, int shared_stride, std::uint32_t* device,
                                     std::int64_t stride, int words, int rows) {
  for_packed(
      device, stride, words, rows,
      [&](int row, int word) {
        __stcs(reinterpret_cast<uint4*>(device + row * stride + word),
               *reinterpret_cast<const uint4*>(shared + row * shared_stride + 4 * word));
      },
      [&](int row, int word) {
        __stcs(device + row * stride + word,
               *reinterpret_cast<const std::uint32_t*>(shared + row * shared_stride + 4 * word));
      });
}
// Starts copying them in: copy_async_commit() ends the group.
__device__ inline void copy_rows_in(char* shared, int shared_stride, const std::uint32_t* device,
                                    std::int64_t stride, int words, int rows) {
  for_packed(
      device, stride, words, rows,
      [&](int row, int word) {
        copy_async_16(shared + row * shared_stride + 4 * word, device + row * stride + word);
      },
      [&](int row, int word) {
        *reinterpret_cast<std::uint32_t*>(shared + row * shared_stride + 4 * word) =
            device[row * stride + word];
      });
}

// Does each row begin where 16 bytes do?
template <class View>
bool pieces_aligned(const View& view, std::int64_t rows) {
  const auto step = static_cast<std::uintptr_t>(view.row_stride()) * size_of(view.dtype);
  return reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 && (rows <= 1 || step % 16 == 0);
}

// A block to a multiprocessor, of warps that take tiles of `tile_rows` rows in turn: as many as
// shared memory has room for (`fixed` bytes for the block, `warp` for each), as `most_warps`, and
// as there is work for.
inline Grid tiles_grid(std::int64_t rows, int tile_rows, int most_warps, int fixed, int warp,
                       int device) {
  const Limits& has = limits(device);
  const std::int64_t tiles = (rows + tile_rows - 1) / tile_rows;
  const std::int64_t room = (static_cast<int>(has.shared_per_block) - fixed) / warp;
  const std::int64_t share = (tiles + has.multiprocessors - 1) / has.multiprocessors;
  const auto warps =
      static_cast<int>(std::min({room, static_cast<std::int64_t>(most_warps), share}));
  return {.blocks = std::min<std::int64_t>(has.multiprocessors, (tiles + warps - 1) / warps),
          .threads = 32 * warps,
          .shared = static_cast<std::size_t>(fixed + warps * warp)};
}

// What a block of such warps has in shared memory beside its tiles.
struct TilesShared {
  std::uint64_t arrived[32];  // a barrier for each warp's BulkCopiesIn
  std::uint32_t taken;
};

// A block has tiles blockIdx.x, blockIdx.x + gridDim.x and so on. A warp begins with one of the
// first and takes the next one that is left when it is ready, so that at the end it waits for no
// slower one. Between the constructor and next(): a barrier of the block.
class Tiles {
 public:
  __device__ explicit Tiles(TilesShared& shared) : taken_(&shared.taken) {
    if (threadIdx.x == 0) *taken_ = blockDim.x / 32;
  }
  __device__ std::uint32_t first() const { return blockIdx.x + threadIdx.x / 32 * gridDim.x; }
  __device__ std::uint32_t next() const {
    std::uint32_t n = 0;
    if (lane_index() == 0) n = atomicAdd(taken_, 1u);
    return blockIdx.x + __shfl_sync(kAllLanes, n, 0) * gridDim.x;
  }

 private:
  std::uint32_t* taken_;
};

}  // namespace bittern::cuda
