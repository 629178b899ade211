// Two kernels. `cuda` does the header's sums as they stand, on registers. `cuda_mma` gives them to
// the tensor cores: the operands are rounded where the header says, products are exact, and what
// differs is the order of the sums and that tensor cores truncate where fma rounds.
#include <cmath>
#include <cstring>
#include <string>

#include "bittern/ops/gdn_recompute_w_u.h"
#include "core/math.h"
#include "cuda/gdn.cuh"
#include "cuda/ptx.cuh"
#include "cuda/runtime.cuh"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = GdnRecomputeWU;
using cuda::ChunkTokens;
using cuda::Divisor;

constexpr int kThreads = 128;
constexpr int kMostRows = 64;  // of a chunk

// A block does a chunk of up to `heads_per_block` of the value heads that share a key head.
struct Problem {
  cuda::ChunkSlots slots;
  const void *k, *v, *a;
  const float *beta, *g;
  void *w, *u;  // null: left out
  std::int64_t key_heads, value_heads, sharing;
  int key_dim, value_dim, heads_per_block;
  bool tiled, lower;
  Divisor groups, units;  // blocks of a key head; of a chunk
  std::int64_t items;

  Problem(const Op::Desc& d, const Op::Args& args, int most_heads)
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
        sharing(d.value_heads / d.key_heads),
        key_dim(static_cast<int>(d.key_dim)),
        value_dim(static_cast<int>(d.value_dim)),
        heads_per_block(static_cast<int>(std::min<std::int64_t>(sharing, most_heads))),
        tiled(d.head_map == HeadMap::tiled),
        lower(d.lower_triangular),
        groups((sharing + heads_per_block - 1) / heads_per_block),
        units(key_heads * groups.value()),
        items(slots.count * units.value()) {}

  struct Item {
    ChunkTokens chunk;
    std::int64_t key_head, first;  // the first of its value heads among the key head's
    int heads;
  };
  __device__ Item item(std::int64_t index) const {
    const std::int64_t slot = units.divide(index), unit = index - slot * units.value();
    const std::int64_t key_head = groups.divide(unit);
    const std::int64_t first = (unit - key_head * groups.value()) * heads_per_block;
    const std::int64_t left = sharing - first;
    return {slots.at(slot), key_head, first,
            left < heads_per_block ? static_cast<int>(left) : heads_per_block};
  }
  // As GdnDesc::value_head.
  __device__ std::int64_t value_head(std::int64_t key_head, std::int64_t i) const {
    return tiled ? key_head + i * key_heads : key_head * sharing + i;
  }
  // How many columns of A's row i count, in a chunk of `rows`.
  __device__ int terms(int i, int rows) const { return i >= rows ? 0 : lower ? i + 1 : rows; }
};

// X(x * beta), X((x * beta) * decay)
template <class X>
__device__ float scaled(X x, float beta) {
  return cuda::load_math(cuda::store_math<X>(cuda::load_math(x) * beta));
}
template <class X>
__device__ float scaled(X x, float beta, float decay) {
  return cuda::load_math(cuda::store_math<X>(cuda::load_math(x) * beta * decay));
}

// ---- cuda: fma by fma ----

// A thread has 8 rows and 2 x 4 columns of a slab of kSlab columns: thread t has rows 8 (t / 16)..
// and columns 4 (t % 16).. and 64 + 4 (t % 16)..
constexpr int kTileRows = 8, kSlab = 128, kHalf = kSlab / 2;
constexpr int kMatrixPitch = kMostRows + 4;  // floats: rows of A start in different banks

struct ExactShared {
  float a[kMostRows * kMatrixPitch];
  float b[kMostRows * kSlab];
  float beta[kMostRows], decay[kMostRows];
};

template <class X, class M>
__global__ void __launch_bounds__(kThreads) recompute(const Problem p) {
  auto& s = *cuda::dynamic_shared<ExactShared>();
  const int first_row = static_cast<int>(threadIdx.x) / 16 * kTileRows;
  const int first_column = static_cast<int>(threadIdx.x) % 16 * 4;
  for (std::int64_t index = blockIdx.x; index < p.items; index += gridDim.x) {
    const Problem::Item item = p.item(index);
    const int rows = item.chunk.rows, chunk = p.slots.chunk;
    const std::int64_t head = p.value_head(item.key_head, item.first);
    const std::int64_t first = item.chunk.begin * p.value_heads + head;  // row of the value heads
    __syncthreads();
    const int column = static_cast<int>(threadIdx.x) % chunk;
    for (int i = static_cast<int>(threadIdx.x) / chunk; i < rows; i += kThreads / chunk) {
      if (column >= p.terms(i, rows)) continue;
      const auto* a = static_cast<const M*>(p.a) + (first + i * p.value_heads) * chunk;
      s.a[i * kMatrixPitch + column] = cuda::load_math(a[column]);
    }
    if (static_cast<int>(threadIdx.x) < rows) {
      const std::int64_t at = first + threadIdx.x * p.value_heads;
      s.beta[threadIdx.x] = p.beta[at];
      s.decay[threadIdx.x] = math::exp(p.g[at]);
    }
    int terms[kTileRows], most = 0;
#pragma unroll
    for (int r = 0; r < kTileRows; ++r) {
      terms[r] = p.terms(first_row + r, rows);
      most = max(most, terms[r]);
    }
    // X(A b) for the `width` columns of b = scaled(j, x), x being row j of `from`.
    const auto product = [&](const X* from, std::int64_t stride, int width, X* to, auto&& scale) {
      for (int slab = 0; slab < width; slab += kSlab) {
        __syncthreads();
        const int mine = slab + static_cast<int>(threadIdx.x);
        if (mine < width) {
          for (int j = 0; j < rows; ++j)
            s.b[j * kSlab + threadIdx.x] = scale(j, from[j * stride + mine]);
        }
        __syncthreads();
        float acc[kTileRows][8] = {};
        for (int j0 = 0; j0 < most; j0 += 4) {
          float4 a[kTileRows];
#pragma unroll
          for (int r = 0; r < kTileRows; ++r)
            a[r] = *reinterpret_cast<const float4*>(&s.a[(first_row + r) * kMatrixPitch + j0]);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float* row = s.b + (j0 + e) * kSlab + first_column;
            const float4 low = *reinterpret_cast<const float4*>(row);
            const float4 high = *reinterpret_cast<const float4*>(row + kHalf);
            const float b[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int r = 0; r < kTileRows; ++r) {
              if (j0 + e >= terms[r]) continue;
              const float factor = e == 0 ? a[r].x : e == 1 ? a[r].y : e == 2 ? a[r].z : a[r].w;
#pragma unroll
              for (int c = 0; c < 8; ++c) acc[r][c] = std::fma(factor, b[c], acc[r][c]);
            }
          }
        }
        // Through shared memory, so that rows are written whole.
        __syncthreads();
#pragma unroll
        for (int r = 0; r < kTileRows; ++r) {
          float* row = s.b + (first_row + r) * kSlab + first_column;
          *reinterpret_cast<float4*>(row) = make_float4(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
          *reinterpret_cast<float4*>(row + kHalf) =
              make_float4(acc[r][4], acc[r][5], acc[r][6], acc[r][7]);
        }
        __syncthreads();
        if (mine < width) {
          for (int i = 0; i < rows; ++i)
            to[(first + i * p.value_heads) * width + mine] =
                cuda::store_math<X>(s.b[i * kSlab + threadIdx.x]);
        }
      }
    };
    if (rows == 0) continue;
    if (p.u != nullptr) {
      product(static_cast<const X*>(p.v) + first * p.value_dim, p.value_heads * p.value_dim,
              p.value_dim, static_cast<X*>(p.u), [&](int j, X x) { return scaled(x, s.beta[j]); });
    }
    if (p.w != nullptr) {
      product(
          static_cast<const X*>(p.k) + (item.chunk.begin * p.key_heads + item.key_head) * p.key_dim,
          p.key_heads * p.key_dim, p.key_dim, static_cast<X*>(p.w),
          [&](int j, X x) { return scaled(x, s.beta[j], s.decay[j]); });
    }
  }
}

template <class X, class M>
Status run_exact(const Op::Desc& d, const Op::Args& a, Stream stream) {
  const Problem p(d, a, 1);
  return cuda::launch(Op::kName, recompute<X, M>,
                      {.blocks = p.items, .threads = kThreads, .shared = sizeof(ExactShared)},
                      a.k.device.index, stream, p);
}

Status run(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace) {
  return visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    return visit<float, bf16>(d.a_element,
                              [&]<class M>(Type<M>) { return run_exact<X, M>(d, a, stream); });
  });
}

// ---- cuda_mma: on the tensor cores ----
//
// The traffic is 6 times what the products take, so all that counts is to keep copies in flight: a
// block asks for all its tiles at once, three or four blocks share a multiprocessor, and one's
// products hide behind the others' copies. The two value heads of a key head go to one block, which
// reads k once.
//
//   tile        rows of 16-bit elements in shared memory, in pieces of 16 bytes, swizzled
//   warp        has slabs of 32 columns and all rows: it alone reads these columns of k and v, so
//               it scales them in registers, and what it makes of them takes v's place on the way
//               out. Nothing but the arrival of tiles needs a barrier.
//   A in f32    a = high + middle + low, the significand's first, second and last 8 bits: exact
//               down to 2^-109, and within 2^-133 below
//   k, v in f16 x = leading + rest in bf16, exactly
//
// Parts are multiplied smallest first, so the accumulator is still small and so is what truncation
// loses there; then 4 products of 16 terms of full size follow, each within 10.5 * 2^-24 of the sum
// of magnitudes where addends are aligned with two extra bits (sm_80: 8 of 8 terms, 6.5). That is
// 52 * 2^-24 at most, inside the header's bound.
//
// 0 * inf of a part or of the padding would be NaN where the definition has none: a slab with a
// non-finite factor is done again by the definition.

constexpr int kWarps = kThreads / 32;
constexpr int kHeads = 2;                             // value heads of a block, at most
constexpr int kWarpColumns = 32;                      // columns of a slab
constexpr int kSteps = kMostRows / 16;                // 16 x 16 tiles along an axis of A
constexpr int kTilesAcross = kWarpColumns / 8;        // 16 x 8 tiles of a slab
constexpr int kTilesDown = 2;                         // that a warp sums at a time
constexpr int kPiece = 16;                            // bytes
constexpr int kMatrixBytes = kMostRows * 2;           // of a row of a part of A
constexpr int kRawBytes = kMostRows * sizeof(float);  // of a row of A in f32

template <class M>
constexpr int kMatrixParts = sizeof(M) == 4 ? 3 : 1;
template <class X>
constexpr int kValueParts = std::is_same_v<X, f16> ? 2 : 1;

// Rows that are filled, with zeros past the chunk: whole 16 x 16 tiles.
__device__ int padded(int rows) { return (rows + 15) & ~15; }

// Where a piece lies. Every eight rows permute the pieces of 128 bytes among themselves: a column
// of pieces meets every bank.
__device__ int swizzled(int row, int piece, int pitch) {
  return row * pitch + ((piece ^ (row & 7)) * kPiece);
}

struct Layout {
  int pitch;  // bytes of a row of k's and v's tiles
  int tile, matrix, low;
  __host__ __device__ Layout(int widest, int chunk, bool split)
      : pitch((widest + 63) / 64 * 128),
        tile(chunk * pitch),
        matrix(chunk * (split ? kRawBytes : kMatrixBytes)),
        low(split ? chunk * kMatrixBytes : 0) {}
  __host__ __device__ int bytes(int heads) const {
    return tile + heads * (tile + matrix) + low +
           2 * heads * kMostRows * static_cast<int>(sizeof(float));
  }
};

// Thread t has pieces t % 16, t % 16 + 16.. of rows t / 16, t / 16 + 8..
template <class X>
__device__ void copy_tile(char* tile, int pitch, const X* from, std::int64_t stride, int rows,
                          int width) {
  constexpr int kElements = kPiece / sizeof(X);
  const int first = static_cast<int>(threadIdx.x) % 16;
  for (int row = static_cast<int>(threadIdx.x) / 16; row < padded(rows); row += kThreads / 16) {
    const X* at = row < rows ? from + row * stride : from;
    for (int piece = first; piece * kElements < width; piece += 16)
      cuda::copy_async_16(tile + swizzled(row, piece, pitch), at + piece * kElements,
                          row < rows ? kPiece : 0);
  }
}

// The elements of A that count, zeros for the others. In bf16 swizzled, in f32 as they come.
template <class M>
__device__ void copy_matrix(const Problem& p, char* to, const M* from, int rows) {
  constexpr int kElements = kPiece / sizeof(M), kPieces = kMostRows / kElements;
  const int piece = static_cast<int>(threadIdx.x) % kPieces;
  if (piece * kElements >= padded(rows)) return;
  for (int row = static_cast<int>(threadIdx.x) / kPieces; row < padded(rows);
       row += kThreads / kPieces) {
    const int bytes = (p.terms(row, rows) - piece * kElements) * static_cast<int>(sizeof(M));
    const int read = max(0, min(bytes, kPiece));
    const M* at = from + row * p.value_heads * p.slots.chunk + piece * kElements;
    cuda::copy_async_16(to + (sizeof(M) == 4 ? row * kRawBytes + piece * kPiece
                                             : swizzled(row, piece, kMatrixBytes)),
                        read > 0 ? at : from, read);
  }
}

// The upper halves of two words: of f32 whose lower halves are 0, a pair of bf16.
__device__ std::uint32_t upper_halves(std::uint32_t x, std::uint32_t y) {
  return __byte_perm(x, y, 0x7632);
}
__device__ float upper_half(float x) { return __uint_as_float(__float_as_uint(x) & 0xffff0000u); }

// A as copied becomes its high and middle parts, and `low`.
__device__ void split_matrix(char* a, char* low, int chunk, int rows) {
  constexpr int kPieces = kRawBytes / kPiece, kTurns = kMostRows * kPieces / kThreads;
  const int first = static_cast<int>(threadIdx.x) / kPieces;
  const int piece = static_cast<int>(threadIdx.x) % kPieces;
  const auto wanted = [&](int row) { return row < padded(rows) && piece * 4 < padded(rows); };
  float4 raw[kTurns];
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const int row = first + i * kThreads / kPieces;
    if (wanted(row)) raw[i] = *reinterpret_cast<float4*>(a + row * kRawBytes + piece * kPiece);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const int row = first + i * kThreads / kPieces;
    if (!wanted(row)) continue;
    const float x[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
    std::uint32_t part[3][4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const bool finite = fabsf(x[e]) < INFINITY;
      const float rest = finite ? x[e] - upper_half(x[e]) : 0.0f;
      part[0][e] = isnan(x[e]) ? 0x7fc00000u : __float_as_uint(x[e]);
      part[1][e] = __float_as_uint(rest);
      part[2][e] = __float_as_uint(rest - upper_half(rest));
    }
    const int at = swizzled(row, piece / 2, kMatrixBytes) + piece % 2 * 8;
    char* const planes[3] = {a, a + chunk * kMatrixBytes, low};
#pragma unroll
    for (int n = 0; n < 3; ++n)
      *reinterpret_cast<uint2*>(planes[n] + at) =
          make_uint2(upper_halves(part[n][0], part[n][1]), upper_halves(part[n][2], part[n][3]));
  }
  __syncthreads();
}

// Two elements in a register, the first in the lower half.
template <class X>
__device__ std::uint32_t pack_pair(float x, float y) {
  if constexpr (std::is_same_v<X, bf16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
    std::uint32_t bits;
    memcpy(&bits, &pair, sizeof bits);
    return bits;
  } else {
    const __half2 pair = __floats2half2_rn(x, y);
    std::uint32_t bits;
    memcpy(&bits, &pair, sizeof bits);
    return bits;
  }
}
template <class X>
__device__ float2 unpack_pair(std::uint32_t bits) {
  return make_float2(cuda::load_math(X{static_cast<std::uint16_t>(bits)}),
                     cuda::load_math(X{static_cast<std::uint16_t>(bits >> 16)}));
}

// Sets bit 15 or 31 if an element's exponent is all ones.
template <class X>
__device__ std::uint32_t mark_non_finite(std::uint32_t pair) {
  return std::is_same_v<X, bf16> ? (pair & 0x7f807f80u) + 0x00800080u
                                 : (pair & 0x7c007c00u) + 0x04000400u;
}
__device__ bool marked(std::uint32_t marks) { return (marks & 0x80008000u) != 0; }

// One product of a chunk and head: out = X(A b), b = X(x * beta) or, with kDecay,
// X((x * beta) * decay).
template <class X, class M, bool kDecay>
struct Product {
  const Problem& p;
  const char* planes[kMatrixParts<M>];  // A's parts, the largest first
  const char* x;                        // the tile that b comes from
  char* stage;                          // the tile whose columns the result passes through
  const float *beta, *decay;
  X* out;  // the result's row 0
  std::int64_t out_stride;
  int pitch, rows, width;

  // Columns column .. column + kWarpColumns - 1, by one warp.
  __device__ void slab(int column) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int steps = padded(rows) / 16;
    std::uint32_t b[kValueParts<X>][kSteps][kTilesAcross][2];
    std::uint32_t marks = 0;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step >= steps) continue;
      // Lane l's elements of b are in rows 2 (l % 4) and 2 (l % 4) + 1 of 8: see multiply_bf16.
      float2 row_beta[2], row_decay[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = 16 * step + 8 * half + lane % 4 * 2;
        row_beta[half] = *reinterpret_cast<const float2*>(beta + row);
        if constexpr (kDecay) row_decay[half] = *reinterpret_cast<const float2*>(decay + row);
      }
#pragma unroll
      for (int tile = 0; tile < kTilesAcross; tile += 2) {
        std::uint32_t pairs[4] = {};
        if (column + 8 * tile < width) {
          cuda::load_tiles_transposed(
              pairs, x + swizzled(16 * step + lane % 16, column / 8 + tile + lane / 16, pitch));
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int half = i % 2;
          float2 pair = unpack_pair<X>(pairs[i]);
          pair.x *= row_beta[half].x;
          pair.y *= row_beta[half].y;
          if constexpr (kDecay) {
            pair.x *= row_decay[half].x;
            pair.y *= row_decay[half].y;
          }
          const std::uint32_t rounded = pack_pair<X>(pair.x, pair.y);
          marks |= mark_non_finite<X>(rounded);
          if constexpr (kValueParts<X> == 1) {
            b[0][step][tile + i / 2][half] = rounded;
          } else {
            pair = unpack_pair<X>(rounded);
            b[0][step][tile + i / 2][half] =
                upper_halves(__float_as_uint(pair.x), __float_as_uint(pair.y));
            b[1][step][tile + i / 2][half] =
                upper_halves(__float_as_uint(pair.x - upper_half(pair.x)),
                             __float_as_uint(pair.y - upper_half(pair.y)));
          }
        }
      }
    }
    if constexpr (kValueParts<X> > 1) {  // inf * rest would be NaN where rest is 0
      for (int tile = 0; tile < steps * steps; ++tile) {
        std::uint32_t a[4];
        load_matrix(a, 0, tile / steps, tile % steps);
#pragma unroll
        for (int i = 0; i < 4; ++i) marks |= mark_non_finite<bf16>(a[i]);
      }
    }
    if (__any_sync(~0u, marked(marks))) {
      by_definition(column + lane);
      __syncwarp();
      return;
    }
    __syncwarp();
#pragma unroll
    for (int first = 0; first < kSteps; first += kTilesDown) {
      if (first >= steps) continue;
      float sums[kTilesDown][kTilesAcross][4] = {};
#pragma unroll
      for (int part = kMatrixParts<M> - 1; part >= 0; --part) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
#pragma unroll
          for (int down = 0; down < kTilesDown; ++down) {
            if (step >= steps || first + down >= steps || (p.lower && step > first + down))
              continue;
            std::uint32_t a[4];
            load_matrix(a, part, first + down, step);
#pragma unroll
            for (int of_b = kValueParts<X> - 1; of_b >= 0; --of_b)
#pragma unroll
              for (int tile = 0; tile < kTilesAcross; ++tile)
                cuda::multiply_bf16(sums[down][tile], a, b[of_b][step][tile]);
          }
        }
      }
#pragma unroll
      for (int down = 0; down < kTilesDown; ++down) {
        if (first + down >= steps) continue;
#pragma unroll
        for (int tile = 0; tile < kTilesAcross; ++tile) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float* sum = sums[down][tile] + 2 * half;
            const int row = 16 * (first + down) + 8 * half + lane / 4;
            char* at = stage + swizzled(row, column / 8 + tile, pitch);
            reinterpret_cast<std::uint32_t*>(at)[lane % 4] = pack_pair<X>(sum[0], sum[1]);
          }
        }
      }
    }
    __syncwarp();
    // Out again in pieces: lane l has piece l % 4 of a row; rows r and r + 4 meet different banks.
    constexpr int kElements = kPiece / sizeof(X);
    const int at = column + lane % 4 * kElements;
    if (at < width) {
#pragma unroll
      for (int turn = 0; turn < kMostRows / 8; ++turn) {
        const int row = turn * 8 + lane / 8 + lane / 4 % 2 * 4;
        if (row >= rows) continue;
        __stcs(reinterpret_cast<uint4*>(out + row * out_stride + at),
               *reinterpret_cast<const uint4*>(stage + swizzled(row, at / kElements, pitch)));
      }
    }
    __syncwarp();
  }

  // This lane's elements of the 16 x 16 tile (down, across) of a part of A.
  __device__ void load_matrix(std::uint32_t (&a)[4], int part, int down, int across) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    cuda::load_tiles(
        a, planes[part] + swizzled(16 * down + lane % 16, 2 * across + lane / 16, kMatrixBytes));
  }
  __device__ X element(const char* tile, int row, int column, int tile_pitch) const {
    constexpr int kElements = kPiece / sizeof(X);
    const char* piece = tile + swizzled(row, column / kElements, tile_pitch);
    return reinterpret_cast<const X*>(piece)[column % kElements];
  }
  __device__ float matrix(int i, int j) const {
    float sum = 0;
#pragma unroll
    for (int part = kMatrixParts<M> - 1; part >= 0; --part) {
      const char* piece = planes[part] + swizzled(i, j / 8, kMatrixBytes);
      sum += cuda::load_math(reinterpret_cast<const bf16*>(piece)[j % 8]);
    }
    return sum;
  }
  __device__ void by_definition(int column) const {
    if (column >= width) return;
    for (int i = 0; i < rows; ++i) {
      float acc = 0;
      for (int j = 0; j < p.terms(i, rows); ++j) {
        const X value = element(x, j, column, pitch);
        acc = std::fma(matrix(i, j),
                       kDecay ? scaled(value, beta[j], decay[j]) : scaled(value, beta[j]), acc);
      }
      out[i * out_stride + column] = cuda::store_math<X>(acc);
    }
  }
};

template <class X, class M>
__global__ void __launch_bounds__(kThreads, kValueParts<X> > 1 ? 3 : 4)
    recompute_mma(const Problem p) {
  constexpr bool kSplit = kMatrixParts<M> > 1;
  const int chunk = p.slots.chunk;
  const Layout layout(max(p.key_dim, p.value_dim), chunk, kSplit);
  char* const k_tile = cuda::dynamic_shared<char>();
  char* const v_tiles = k_tile + layout.tile;
  char* const matrices = v_tiles + p.heads_per_block * layout.tile;
  char* const low = matrices + p.heads_per_block * layout.matrix;
  auto* const betas = reinterpret_cast<float*>(low + layout.low);
  float* const decays = betas + p.heads_per_block * kMostRows;
  const int warp = static_cast<int>(threadIdx.x) / 32;

  for (std::int64_t index = blockIdx.x; index < p.items; index += gridDim.x) {
    const Problem::Item item = p.item(index);
    const int rows = item.chunk.rows;
    if (rows == 0) continue;
    const auto first = [&](int h) {  // head h's row of the chunk's first token
      return item.chunk.begin * p.value_heads + p.value_head(item.key_head, item.first + h);
    };
    if (p.w != nullptr) {
      const std::int64_t at = item.chunk.begin * p.key_heads + item.key_head;
      copy_tile(k_tile, layout.pitch, static_cast<const X*>(p.k) + at * p.key_dim,
                p.key_heads * p.key_dim, rows, p.key_dim);
    }
    for (int h = 0; h < item.heads; ++h) {
      copy_matrix(p, matrices + h * layout.matrix, static_cast<const M*>(p.a) + first(h) * chunk,
                  rows);
      if (p.u != nullptr) {
        copy_tile(v_tiles + h * layout.tile, layout.pitch,
                  static_cast<const X*>(p.v) + first(h) * p.value_dim, p.value_heads * p.value_dim,
                  rows, p.value_dim);
      }
      cuda::copy_async_commit();
    }
    for (int i = static_cast<int>(threadIdx.x); i < item.heads * kMostRows; i += kThreads) {
      const int row = i % kMostRows;
      const std::int64_t at = first(i / kMostRows) + row * p.value_heads;
      betas[i] = row < rows ? p.beta[at] : 0.0f;
      decays[i] = row < rows ? math::exp(p.g[at]) : 0.0f;
    }
    for (int h = 0; h < item.heads; ++h) {
      static_assert(kHeads == 2);
      if (h + 1 < item.heads) {
        cuda::copy_async_wait<1>();
      } else {
        cuda::copy_async_wait<0>();
      }
      __syncthreads();
      char* const a = matrices + h * layout.matrix;
      char* const v_tile = v_tiles + h * layout.tile;
      if constexpr (kSplit) split_matrix(a, low, chunk, rows);
      const auto product = [&]<bool kDecay>(std::bool_constant<kDecay>, const char* x, int width,
                                            void* out) {
        Product<X, M, kDecay> of{.p = p,
                                 .planes = {a},
                                 .x = x,
                                 .stage = v_tile,
                                 .beta = betas + h * kMostRows,
                                 .decay = decays + h * kMostRows,
                                 .out = static_cast<X*>(out) + first(h) * width,
                                 .out_stride = p.value_heads * width,
                                 .pitch = layout.pitch,
                                 .rows = rows,
                                 .width = width};
        if constexpr (kSplit) {
          of.planes[1] = a + chunk * kMatrixBytes;
          of.planes[2] = low;
        }
        return of;
      };
      const auto u = product(std::false_type(), v_tile, p.value_dim, p.u);
      const auto w = product(std::true_type(), k_tile, p.key_dim, p.w);
      for (int column = warp * kWarpColumns; column < max(p.key_dim, p.value_dim);
           column += kWarps * kWarpColumns) {
        if (p.u != nullptr && column < p.value_dim) u.slab(column);
        if (p.w != nullptr && column < p.key_dim) w.slab(column);
      }
    }
    __syncthreads();
  }
}

Status supports_mma(const Op::Desc& d) {
  if (d.element != DType::bf16 && d.element != DType::f16)
    return unsupported(std::string("element: ") + name(d.element) + ", expected bf16 or f16");
  const auto refuse = [](const char* field, std::int64_t value) {
    return unsupported(std::string(field) + ": " + std::to_string(value) +
                       ", expected a multiple of 16");
  };
  if (d.key_dim % 16 != 0) return refuse("key_dim", d.key_dim);
  if (d.value_dim % 16 != 0) return refuse("value_dim", d.value_dim);
  return {};
}

Status run_mma(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace workspace) {
  // Rows are whole pieces; where the first one starts is the caller's choice.
  for (const void* data : {a.k.data, a.v.data, a.a.data, static_cast<const void*>(a.w.data),
                           static_cast<const void*>(a.u.data)})
    if (reinterpret_cast<std::uintptr_t>(data) % kPiece != 0) return run(d, a, stream, workspace);
  return visit<f16, bf16>(d.element, [&]<class X>(Type<X>) {
    return visit<float, bf16>(d.a_element, [&]<class M>(Type<M>) {
      const Problem p(d, a, kHeads);
      const Layout layout(max(p.key_dim, p.value_dim), d.chunk, sizeof(M) == 4);
      return cuda::launch(Op::kName, recompute_mma<X, M>,
                          {.blocks = p.items,
                           .threads = kThreads,
                           .shared = static_cast<std::size_t>(layout.bytes(p.heads_per_block))},
                          a.k.device.index, stream, p);
    });
  });
}

PrecisionGuarantee mma_guarantee(const Op::Desc& d) {
  PrecisionGuarantee guarantee = Op::contract(d);
  guarantee.same_bits_on_all_backends = false;
  return guarantee;
}

constexpr Kernel<Op> kKernels[] = {
    {.name = "cuda_mma",
     .backend = "cuda",
     .weaker = mma_guarantee,
     .supports = supports_mma,
     .architecture = cuda::architecture,
     .run = run_mma},
    {.name = "cuda", .backend = "cuda", .architecture = cuda::architecture, .run = run}};

}  // namespace

std::span<const Kernel<GdnRecomputeWU>> gdn_recompute_w_u_cuda() { return kKernels; }

}  // namespace bittern
