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

// X((x * beta) * decay); with decay 1, X(x * beta).
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
              p.value_dim, static_cast<X*>(p.u),
              [&](int j, X x) { return scaled(x, s.beta[j], 1.0f); });
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
// The traffic takes 6 times as long as the products, so all that counts is to keep copies in
// flight: a block asks for all its tiles at once, three or four blocks share a multiprocessor, and
// one's products hide behind the others' copies. Two value heads of a key head go to one block,
// which reads k once.
//
//   tile        rows of 16-bit elements in shared memory, in pieces of 16 bytes, swizzled
//   warp        has slabs of 32 columns and all rows. With two heads, warps 0 to 3 do the first
//               one's u, then its w, 4 to 7 the second one's; with one, warps 0 to 3 do u, 4 to 7
//               w. A warp alone reads its columns of v (with one head, of k), so it scales them in
//               registers, and its results take their place on the way out: after the tiles'
//               arrival no barrier is needed.
//   A in f32    a = high + middle + low, the significand's first, second and last 8 bits: exact
//               down to 2^-109, and within 2^-133 below
//   k, v in f16 x = leading + rest in bf16, exactly
//
// Parts are multiplied smallest first, so the accumulator is still small and so is what truncation
// loses there; then 4 products of 16 terms of full size follow, each within 10.5 * 2^-24 of the sum
// of magnitudes where addends are aligned with two extra bits (sm_80: 8 of 8 terms, 6.5). That is
// 52 * 2^-24 at most, inside the header's bound.
//
// 0 * inf of a part or of the padding would be NaN where the definition has none: columns with a
// non-finite factor are done by the definition.

constexpr int kHeads = 2;                    // value heads of a block, at most
constexpr int kMmaThreads = 256;             //
constexpr int kMmaSlab = 32;                 // columns of a warp
constexpr int kSteps = kMostRows / 16;       // 16 x 16 tiles along an axis of A
constexpr int kTilesAcross = kMmaSlab / 8;   // 16 x 8 tiles of the result that a warp sums at
constexpr int kTilesDown = 1;                // a time
constexpr int kPiece = 16;                   // bytes
constexpr int kMatrixBytes = 2 * kMostRows;  // of a row of a part of A
constexpr int kRawBytes = 2 * kMatrixBytes;  // of a row of A in f32

template <class M>
constexpr int kMatrixParts = sizeof(M) == 4 ? 3 : 1;
template <class X>
constexpr int kValueParts = std::is_same_v<X, f16> ? 2 : 1;
// Blocks whose registers must fit a multiprocessor.
template <class X, class M>
constexpr int kBlocks = kMatrixParts<M> * kValueParts<X> == 1 ? 3 : 2;

// Rows that are filled, with zeros past the chunk: whole 16 x 16 tiles.
__device__ int padded(int rows) { return (rows + 15) & ~15; }

// Where a piece lies. Every eight rows permute the pieces of 128 bytes among themselves: a column
// of pieces meets every bank.
__device__ int swizzled(int row, int piece, int pitch) {
  return row * pitch + ((piece ^ (row & 7)) * kPiece);
}

// Bytes of shared memory: k's tile, v's tile of each head, A's parts of each head (in f32 it comes
// into the first two), beta and e^g of each head.
struct Layout {
  int pitch;  // of a row of k's and v's tiles
  int tile, part, matrix;
  __host__ __device__ Layout(int widest, int chunk, int parts)
      : pitch((widest + 63) / 64 * 128),
        tile(chunk * pitch),
        part(chunk * kMatrixBytes),
        matrix(parts * part) {}
  __host__ __device__ int bytes(int heads) const {
    return tile + heads * (tile + matrix + 2 * kMostRows * static_cast<int>(sizeof(float)));
  }
};

// Thread t has pieces t % 16, t % 16 + 16.. of rows t / 16, t / 16 + 8..
template <class X>
__device__ void copy_tile(char* tile, int pitch, const X* from, std::int64_t stride, int rows,
                          int width) {
  constexpr int kElements = kPiece / sizeof(X);
  const int first = static_cast<int>(threadIdx.x) % 16;
  for (int row = static_cast<int>(threadIdx.x) / 16; row < padded(rows); row += kMmaThreads / 16) {
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
       row += kMmaThreads / kPieces) {
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

// A as it came becomes its three parts.
__device__ void split_matrix(char* a, int part_bytes, int rows) {
  constexpr int kPieces = kRawBytes / kPiece, kTurns = kMostRows * kPieces / kMmaThreads;
  const int first = static_cast<int>(threadIdx.x) / kPieces;
  const int piece = static_cast<int>(threadIdx.x) % kPieces;
  const auto wanted = [&](int row) { return row < padded(rows) && piece * 4 < padded(rows); };
  float4 raw[kTurns];
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const int row = first + i * kMmaThreads / kPieces;
    if (wanted(row)) raw[i] = *reinterpret_cast<float4*>(a + row * kRawBytes + piece * kPiece);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const int row = first + i * kMmaThreads / kPieces;
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
    char* const at = a + swizzled(row, piece / 2, kMatrixBytes) + piece % 2 * 8;
#pragma unroll
    for (int n = 0; n < 3; ++n)
      *reinterpret_cast<uint2*>(at + n * part_bytes) =
          make_uint2(upper_halves(part[n][0], part[n][1]), upper_halves(part[n][2], part[n][3]));
  }
}

// Two elements in a register, the first in the lower half.
template <class X>
__device__ std::uint32_t pack_pair(float x, float y) {
  std::uint32_t bits;
  if constexpr (std::is_same_v<X, bf16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
    memcpy(&bits, &pair, sizeof bits);
  } else {
    const __half2 pair = __floats2half2_rn(x, y);
    memcpy(&bits, &pair, sizeof bits);
  }
  return bits;
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

// One product of a chunk and head: out = X(A b), b = X((x * beta) * decay), decay being 1 for u.
template <class X, class M>
struct Product {
  static constexpr int kElements = kPiece / sizeof(X), kFloat = sizeof(float);
  // Places in shared memory, in bytes: 32 bits where a pointer would have 64.
  int a;      // its parts, the largest first
  int x;      // the tile that b comes from
  int stage;  // the tile whose columns the result passes through
  int beta, decay;
  bool decays;  // otherwise decay is 1
  X* out;       // the result's row 0
  std::int64_t out_stride;
  int pitch, part_bytes, rows, width;
  bool lower;

  template <class T>
  __device__ static T& at(int place) {
    return *reinterpret_cast<T*>(cuda::dynamic_shared<char>() + place);
  }

  // Columns column .. column + kMmaSlab - 1, by one warp.
  __device__ void slab(int column) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const bool staged = sum(column);
    __syncwarp();
    // Out again in pieces: lane l has piece l % 4 of row l / 4 of 8.
    const int mine = column + lane % 4 * kElements;
    if (staged && mine < width) {
#pragma unroll 4
      for (int row = lane / 4; row < rows; row += 8)
        __stcs(reinterpret_cast<uint4*>(out + row * out_stride + mine),
               at<uint4>(stage + swizzled(row, mine / kElements, pitch)));
    }
    __syncwarp();
  }

  // The same, into `stage`; or straight out, and false.
  __device__ bool sum(int column) const {
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
        row_beta[half] = at<float2>(beta + row * kFloat);
        row_decay[half] = decays ? at<float2>(decay + row * kFloat) : make_float2(1, 1);
      }
#pragma unroll
      for (int tile = 0; tile < kTilesAcross; tile += 2) {
        std::uint32_t pairs[4] = {};
        if (column + 8 * tile < width) {
          cuda::load_tiles_transposed(
              pairs,
              &at<char>(x + swizzled(16 * step + lane % 16, column / 8 + tile + lane / 16, pitch)));
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int half = i % 2;
          float2 pair = unpack_pair<X>(pairs[i]);
          pair.x = pair.x * row_beta[half].x * row_decay[half].x;
          pair.y = pair.y * row_beta[half].y * row_decay[half].y;
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
        std::uint32_t tiles[4];
        load_matrix(tiles, 0, tile / steps, tile % steps);
#pragma unroll
        for (int i = 0; i < 4; ++i) marks |= mark_non_finite<bf16>(tiles[i]);
      }
    }
    if (__any_sync(~0u, marked(marks))) {
      by_definition(column + lane);
      return false;
    }
#pragma unroll 1
    for (int first = 0; first < steps; first += kTilesDown) {
      float sums[kTilesDown][kTilesAcross][4] = {};
#pragma unroll 1
      for (int part = kMatrixParts<M> - 1; part >= 0; --part) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
#pragma unroll
          for (int down = 0; down < kTilesDown; ++down) {
            if (step >= steps || first + down >= steps || (lower && step > first + down)) continue;
            std::uint32_t tiles[4];
            load_matrix(tiles, part, first + down, step);
#pragma unroll
            for (int of_b = kValueParts<X> - 1; of_b >= 0; --of_b)
#pragma unroll
              for (int tile = 0; tile < kTilesAcross; ++tile)
                cuda::multiply_bf16(sums[down][tile], tiles, b[of_b][step][tile]);
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
            const float* pair = sums[down][tile] + 2 * half;
            const int row = 16 * (first + down) + 8 * half + lane / 4;
            at<std::uint32_t>(stage + swizzled(row, column / 8 + tile, pitch) + lane % 4 * 4) =
                pack_pair<X>(pair[0], pair[1]);
          }
        }
      }
    }
    return true;
  }

  // This lane's elements of the 16 x 16 tile (down, across) of a part of A.
  __device__ void load_matrix(std::uint32_t (&to)[4], int part, int down, int across) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    cuda::load_tiles(
        to, &at<char>(a + part * part_bytes +
                      swizzled(16 * down + lane % 16, 2 * across + lane / 16, kMatrixBytes)));
  }

  __device__ void by_definition(int column) const {
    if (column >= width) return;
    for (int i = 0; i < rows; ++i) {
      float acc = 0;
      for (int j = 0; j < (lower ? i + 1 : rows); ++j) {
        float factor = 0;
        for (int part = kMatrixParts<M> - 1; part >= 0; --part) {
          factor += cuda::load_math(
              at<bf16>(a + part * part_bytes + swizzled(i, j / 8, kMatrixBytes) + j % 8 * 2));
        }
        const X value = at<X>(x + swizzled(j, column / kElements, pitch) + column % kElements * 2);
        acc = std::fma(factor,
                       scaled(value, at<float>(beta + j * kFloat),
                              decays ? at<float>(decay + j * kFloat) : 1.0f),
                       acc);
      }
      out[i * out_stride + column] = cuda::store_math<X>(acc);
    }
  }
};

template <class X, class M>
__global__ void __launch_bounds__(kMmaThreads, kBlocks<X, M>) recompute_mma(const Problem p) {
  const int chunk = p.slots.chunk;
  const Layout layout(max(p.key_dim, p.value_dim), chunk, kMatrixParts<M>);
  char* const shared = cuda::dynamic_shared<char>();
  constexpr int kKeys = 0, kGates = kMostRows * sizeof(float);
  const int values = layout.tile;
  const int matrices = values + p.heads_per_block * layout.tile;
  const int betas = matrices + p.heads_per_block * layout.matrix;
  const int decays = betas + p.heads_per_block * kGates;
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
      copy_tile(shared + kKeys, layout.pitch, static_cast<const X*>(p.k) + at * p.key_dim,
                p.key_heads * p.key_dim, rows, p.key_dim);
    }
    for (int h = 0; h < item.heads; ++h) {
      copy_matrix(p, shared + matrices + h * layout.matrix,
                  static_cast<const M*>(p.a) + first(h) * chunk, rows);
      if (p.u != nullptr) {
        copy_tile(shared + values + h * layout.tile, layout.pitch,
                  static_cast<const X*>(p.v) + first(h) * p.value_dim, p.value_heads * p.value_dim,
                  rows, p.value_dim);
      }
    }
    cuda::copy_async_commit();
    for (int i = static_cast<int>(threadIdx.x); i < item.heads * kMostRows; i += kMmaThreads) {
      const int row = i % kMostRows;
      const std::int64_t at = first(i / kMostRows) + row * p.value_heads;
      reinterpret_cast<float*>(shared + betas)[i] = row < rows ? p.beta[at] : 0.0f;
      reinterpret_cast<float*>(shared + decays)[i] = row < rows ? math::exp(p.g[at]) : 0.0f;
    }
    cuda::copy_async_wait<0>();
    __syncthreads();
    if constexpr (kMatrixParts<M> > 1) {
      for (int h = 0; h < item.heads; ++h)
        split_matrix(shared + matrices + h * layout.matrix, layout.part, rows);
      __syncthreads();
    }
    static_assert(kHeads == 2 && kMmaThreads == 256);
    const int head = item.heads == 2 ? warp / 4 : 0;
    const int v_tile = values + head * layout.tile;
#pragma unroll 1
    for (int of_keys = item.heads == 2 ? 0 : warp / 4; of_keys < 2; of_keys += 3 - item.heads) {
      void* const out = of_keys != 0 ? p.w : p.u;
      if (out == nullptr) continue;
      const int width = of_keys != 0 ? p.key_dim : p.value_dim;
      const Product<X, M> product{.a = matrices + head * layout.matrix,
                                  .x = of_keys != 0 ? kKeys : v_tile,
                                  .stage = of_keys != 0 && item.heads == 1 ? kKeys : v_tile,
                                  .beta = betas + head * kGates,
                                  .decay = decays + head * kGates,
                                  .decays = of_keys != 0,
                                  .out = static_cast<X*>(out) + first(head) * width,
                                  .out_stride = p.value_heads * width,
                                  .pitch = layout.pitch,
                                  .part_bytes = layout.part,
                                  .rows = rows,
                                  .width = width,
                                  .lower = p.lower};
#pragma unroll 1
      for (int column = warp % 4 * kMmaSlab; column < width; column += 4 * kMmaSlab)
        product.slab(column);
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
      const Layout layout(std::max(p.key_dim, p.value_dim), d.chunk, kMatrixParts<M>);
      return cuda::launch(Op::kName, recompute_mma<X, M>,
                          {.blocks = p.items,
                           .threads = kMmaThreads,
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
