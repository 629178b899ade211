// By rows, in the definition's order and with its bits: a thread has a column of A, and kRows rows
// of it at a time, whose sums go on side by side.
#include "bittern/ops/gdn_solve.h"
#include "cuda/runtime.cuh"
#include "ops/gdn/gdn.cuh"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = GdnSolve;

constexpr int kThreads = 64;
constexpr int kRows = 8;

struct Problem {
  cuda::ChunkSlots slots;
  const float* l;
  void* a;
  std::int64_t value_heads;
  cuda::Divisor heads;
  std::int64_t items;
  bool pieces;  // rows of L and A may be read and written 16 bytes at a time

  template <class M>
  Problem(const Op::Desc& d, const Op::Args& args, Type<M>)
      : slots(d, args.cu_seqlens),
        l(args.l.as<float>()),
        a(args.a.data),
        value_heads(d.value_heads),
        heads(d.value_heads),
        items(slots.count * d.value_heads),
        pieces(cuda::packs_aligned<float, 4>(args.l.data, 1, 0) &&
               cuda::packs_aligned<M, 4>(args.a.data, 1, 0)) {}
};

template <int kChunk>
struct Matrices {
  float l[kChunk][kChunk], a[kChunk][kChunk];
};

// The matrices of kThreads / kChunk heads, one for each kChunk threads.
template <int kChunk, class M>
__global__ void __launch_bounds__(kThreads) solve(const Problem p) {
  const int group = static_cast<int>(threadIdx.x) / kChunk;
  const int column = static_cast<int>(threadIdx.x) % kChunk;
  Matrices<kChunk>& s = cuda::dynamic_shared<Matrices<kChunk>>()[group];
  constexpr int kGroups = kThreads / kChunk, kAcross = kChunk / 4, kDown = kChunk / kAcross;
  for (std::int64_t first = std::int64_t{blockIdx.x} * kGroups; first < p.items;
       first += std::int64_t{gridDim.x} * kGroups) {
    const std::int64_t index = first + group;
    int rows = 0;
    std::int64_t at = 0;  // of the first row's first element
    if (index < p.items) {
      const std::int64_t slot = p.heads.divide(index);
      const cuda::ChunkTokens chunk = p.slots.at(slot);
      rows = chunk.rows;
      at = (chunk.begin * p.value_heads + index - slot * p.value_heads) * kChunk;
    }
    const std::int64_t stride = p.value_heads * kChunk;
    __syncthreads();
    // What lies above the diagonal comes along, and is not used.
    if (p.pieces) {
      const int piece = column % kAcross * 4;
      for (int i = column / kAcross; i < rows; i += kDown)
        if (piece < i) cuda::copy_async_16(&s.l[i][piece], p.l + at + i * stride + piece);
      cuda::copy_async_commit();
      cuda::copy_async_wait<0>();
    } else {
      for (int i = column + 1; i < rows; ++i) s.l[i][column] = p.l[at + i * stride + column];
    }
    __syncthreads();

    // Columns from 32 on are another warp's than the others. Their first 32 rows are 0, and add
    // nothing to later ones, as long as what L would multiply them by is finite.
    int start = 0;
    if (kChunk > 32 && column >= 32) {
      float zero = 0;
#pragma unroll 8
      for (int i = 1; i < rows; ++i)
        if (column - 32 < i) zero = std::fma(s.l[i][column - 32], 0.0f, zero);
      if (__all_sync(~0u, zero == 0)) {
        start = 32;
        for (int i = 0; i < min(rows, 32); ++i) s.a[i][column] = 0;
      }
    }
    for (int i = start; i < rows; i += kRows) {
      float sums[kRows] = {};
      for (int j = start; j < i; j += 4) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float x = s.a[j + e][column];
#pragma unroll
          for (int r = 0; r < kRows; ++r) sums[r] = std::fma(s.l[i + r][j + e], x, sums[r]);
        }
      }
#pragma unroll
      for (int e = 0; e < kRows; ++e) {
        const float x = (i + e == column ? 1.0f : 0.0f) - sums[e];
        s.a[i + e][column] = x;
#pragma unroll
        for (int r = e + 1; r < kRows; ++r) sums[r] = std::fma(s.l[i + r][i + e], x, sums[r]);
      }
    }
    __syncthreads();
    M* const to = static_cast<M*>(p.a) + at;
    if (p.pieces) {
      const int piece = column % kAcross * 4;
      for (int i = column / kAcross; i < rows; i += kDown) {
        cuda::Pack<M, 4> pack;
#pragma unroll
        for (int e = 0; e < 4; ++e)
          pack.at[e] = cuda::store_math<M>(piece + e <= i ? s.a[i][piece + e] : 0.0f);
        pack.store(to + i * stride + piece);
      }
    } else {
      for (int i = 0; i < rows; ++i)
        to[i * stride + column] = cuda::store_math<M>(column <= i ? s.a[i][column] : 0.0f);
    }
  }
}

template <int kChunk>
Status run_as(const Op::Desc& d, const Op::Args& a, Stream stream) {
  return visit<float, bf16>(d.a_element, [&]<class M>(Type<M> type) {
    constexpr int kGroups = kThreads / kChunk;
    const Problem p(d, a, type);
    return cuda::launch(Op::kName, solve<kChunk, M>,
                        {.blocks = (p.items + kGroups - 1) / kGroups,
                         .threads = kThreads,
                         .shared = kGroups * sizeof(Matrices<kChunk>)},
                        a.a.device.index, stream, p);
  });
}

Status run(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace) {
  return d.chunk == 16   ? run_as<16>(d, a, stream)
         : d.chunk == 32 ? run_as<32>(d, a, stream)
                         : run_as<64>(d, a, stream);
}

constexpr Kernel<Op> kKernels[] = {cuda::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<GdnSolve>> gdn_solve_cuda() { return kKernels; }

}  // namespace bittern
