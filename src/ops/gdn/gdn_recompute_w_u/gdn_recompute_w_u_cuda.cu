// Two kernels. `cuda` does the header's sums as they stand, on registers. `cuda_mma` gives them to
// the tensor cores: the operands are rounded where the header says, products are exact, and what
// differs is the order of the sums and that tensor cores truncate where fma rounds.
#include <cmath>
#include <string>

#include "bittern/ops/gdn_recompute_w_u.h"
#include "core/math.h"
#include "cuda/ptx.cuh"
#include "cuda/runtime.cuh"
#include "ops/gdn/gdn.cuh"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = GdnRecomputeWU;
using cuda::ChunkTokens;
using cuda::Divisor;

constexpr int kThreads = 128;
constexpr int kMostRows = 64;  // of a chunk

// A block does one chunk of one value head. Heads that share a key head are neighbours: what one
// reads of k, the others find in L2.
struct Problem {
  cuda::ChunkSlots slots;
  const void *k, *v, *a;
  const float *beta, *g;
  void *w, *u;  // null: left out
  std::int64_t key_heads, value_heads;
  int key_dim, value_dim;
  bool tiled, lower;
  Divisor sharing, heads;  // value heads of a key head, and all
  std::int64_t items;

  Problem(const Op::Desc& d, const Op::Args& args)
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
        key_dim(static_cast<int>(d.key_dim)),
        value_dim(static_cast<int>(d.value_dim)),
        tiled(d.head_map == HeadMap::tiled),
        lower(d.lower_triangular),
        sharing(d.value_heads / d.key_heads),
        heads(d.value_heads),
        items(slots.count * d.value_heads) {}

  struct Item {
    ChunkTokens chunk;
    std::int64_t key_row, value_row;  // of the first token, among the rows of all heads
  };
  // Index: std::int64_t, or std::uint32_t, whose divisions are cheaper.
  template <class Index>
  __device__ Item item(Index index) const {
    const auto slot = static_cast<Index>(heads.divide(index));
    const auto turn = static_cast<Index>(index - slot * static_cast<Index>(value_heads));
    const auto key_head = static_cast<Index>(sharing.divide(turn));
    const std::int64_t i = turn - key_head * sharing.value();  // as in GdnDesc::value_head
    const ChunkTokens chunk = slots.at(slot);
    return {chunk, chunk.begin * key_heads + key_head,
            chunk.begin * value_heads + (tiled ? key_head + i * key_heads : turn)};
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
    const std::int64_t first = item.value_row;
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
      product(static_cast<const X*>(p.k) + item.key_row * p.key_dim, p.key_heads * p.key_dim,
              p.key_dim, static_cast<X*>(p.w),
              [&](int j, X x) { return scaled(x, s.beta[j], s.decay[j]); });
    }
  }
}

template <class X, class M>
Status run_exact(const Op::Desc& d, const Op::Args& a, Stream stream) {
  const Problem p(d, a);
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
// The traffic takes several times as long as the products, so all that counts is to keep copies in
// flight: a block asks for all its tiles at once, several blocks share a multiprocessor, and one's
// work hides behind the others' copies.
//
//   tile        rows of 16-bit elements in shared memory, in pieces of 16 bytes, swizzled; zeros
//               past the chunk's end. k and v are scaled and rounded where they lie.
//   warp        0 and 1 do u, 2 and 3 w, each in slabs of 64 columns (whole lines are written) of
//               all rows. No other warp reads these columns, so results take their place on the
//               way out, without a barrier.
//   A in f32    a = high + middle + low, the significand's first, second and last 8 bits: exact
//               down to 2^-109, and within 2^-133 below
//   k, v in f16 x = leading + rest in bf16, exactly
//
// Parts are multiplied smallest first, so the accumulator is still small and so is what truncation
// loses there; then 4 products of 16 terms of full size follow, each within 10.5 * 2^-24 of the sum
// of magnitudes where addends are aligned with two extra bits (sm_80: 8 of 8 terms, 6.5). That is
// 52 * 2^-24 at most, inside the header's bound.
//
// 0 * inf of a part, of the padding or above the diagonal would be NaN where the definition has
// none: columns with a result that is not finite are done again by the definition.

constexpr int kMmaSlab = 64;       // columns of a warp: summed in two halves,
constexpr int kMmaHalf = 32;       // which are
constexpr int kTilesAcross = 4;    // 16 x 8 tiles of the result
constexpr int kPiece = 16;         // bytes
constexpr int kMatrixBytes = 128;  // of a row of a part of A, whatever the chunk
constexpr int kWide = 128;         // the width with constant addresses

template <class M>
constexpr int kMatrixParts = sizeof(M) == 4 ? 3 : 1;
template <class X>
constexpr int kValueParts = std::is_same_v<X, f16> ? 2 : 1;
// Blocks whose registers must fit a multiprocessor. Shared memory has room for as many.
template <int kWidth, class X, class M>
constexpr int kBlocks = (kMatrixParts<M> * kValueParts<X> == 1  ? 5
                         : kMatrixParts<M> * kValueParts<X> < 6 ? 4
                                                                : 3) -
                        (kWidth == 0 ? 1 : 0)
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
                        - 1  // less shared memory, and other registers
#endif
    ;

// Where a piece lies. Every eight rows permute the pieces of 128 bytes among themselves: a column
// of pieces meets every bank.
__device__ int swizzled(unsigned row, unsigned piece, int pitch) {
  return static_cast<int>(row * static_cast<unsigned>(pitch) + ((piece ^ (row & 7)) * kPiece));
}

// Bytes of shared memory: k's and v's tile, A's parts (in f32 it comes into the first two), beta
// and e^g.
struct Layout {
  int pitch;  // of a row of k's and v's tiles
  int values, matrix, gates, bytes;
  __host__ __device__ Layout(int widest, int chunk, int parts)
      : pitch((widest + 63) / 64 * 128),
        values(chunk * pitch),
        matrix(2 * values),
        gates(matrix + parts * chunk * kMatrixBytes),
        bytes(gates + 2 * kMostRows * static_cast<int>(sizeof(float))) {}
};

template <class T>
__device__ T& shared_at(int place) {
  return *reinterpret_cast<T*>(cuda::dynamic_shared<char>() + place);
}

// What each thread copies of a tile, and then scales: pieces t % 16, t % 16 + 16.. of rows t / 16,
// t / 16 + kRowsApart..
constexpr int kRowsApart = kThreads / 16;
__device__ bool has_piece(int piece, int width) {
  return width % kWide == 0 ? piece / 16 * kWide < width : piece * 8 < width;
}

// kFull: the chunk has all its rows.
template <int kChunk, bool kFull = false, class X>
__device__ void copy_tile(int tile, int pitch, const X* from, std::int64_t stride, int rows,
                          int width) {
  const unsigned first_row = threadIdx.x / 16, first_piece = threadIdx.x % 16;
  const auto* at = reinterpret_cast<const char*>(from + first_row * stride) + first_piece * kPiece;
#pragma unroll
  for (unsigned turn = 0; turn < kChunk / kRowsApart; ++turn) {
    const unsigned row = turn * kRowsApart + first_row;
#pragma unroll
    for (unsigned piece = first_piece; piece < 32; piece += 16)
      if (has_piece(static_cast<int>(piece), width))
        cuda::copy_async_16(
            &shared_at<char>(tile + swizzled(row, piece, pitch)),
            at + (piece - first_piece) * kPiece,
            kFull || static_cast<int>(row) < rows ? kPiece : 0);  // 0: not even looked at
    at += kRowsApart * stride * static_cast<std::int64_t>(sizeof(X));
  }
}

// Where a piece of A in f32 comes: the first half of each row into its row of the first part, the
// second half into the second part's.
template <int kChunk>
__device__ int raw_place(unsigned row, unsigned piece) {
  return static_cast<int>((piece / 8 * kChunk + row) * kMatrixBytes +
                          (piece % 8 ^ piece / 8) * kPiece);
}

// The elements of A that count, zeros for the others. kFull: all of them count.
template <int kChunk, bool kFull = false, class M>
__device__ void copy_matrix(const Problem& p, int to, const M* from, int rows) {
  constexpr unsigned kElements = kPiece / sizeof(M), kPieces = kMostRows / kElements;
  constexpr unsigned kAtOnce = kThreads / kPieces;
  const unsigned first_row = threadIdx.x / kPieces, piece = threadIdx.x % kPieces;
  if (piece * kElements >= kChunk) return;
  const M* at = from + first_row * p.value_heads * kChunk + piece * kElements;
#pragma unroll
  for (unsigned turn = 0; turn < kChunk / kAtOnce; ++turn) {
    const unsigned row = turn * kAtOnce + first_row;
    const int terms = p.terms(static_cast<int>(row), rows) - static_cast<int>(piece * kElements);
    cuda::copy_async_16(
        &shared_at<char>(to + (sizeof(M) == 4 ? raw_place<kChunk>(row, piece)
                                              : swizzled(row, piece, kMatrixBytes))),
        at, kFull ? kPiece : max(0, min(terms * static_cast<int>(sizeof(M)), kPiece)));
    at += kAtOnce * p.value_heads * kChunk;
  }
}

// The upper halves of two words: of f32 whose lower halves are 0, a pair of bf16.
__device__ std::uint32_t upper_halves(std::uint32_t x, std::uint32_t y) {
  return __byte_perm(x, y, 0x7632);
}
__device__ float upper_half(float x) { return __uint_as_float(__float_as_uint(x) & 0xffff0000u); }

// A as it came becomes its three parts, row by row: the lanes that have read a row write it.
// kClean: what is not finite has itself and zeros as parts, or else NaN among them.
template <int kChunk, bool kClean>
__device__ void split_matrix(int a) {
  constexpr unsigned kAtOnce = kThreads / 8;  // a lane has 8 elements of a row
  const unsigned piece = threadIdx.x % 8;
#pragma unroll
  for (unsigned turn = 0; turn < kChunk / kAtOnce; ++turn) {
    const unsigned row = turn * kAtOnce + threadIdx.x / 8;
    float4 raw[2];
#pragma unroll
    for (unsigned i = 0; i < 2; ++i)
      raw[i] = shared_at<float4>(a + raw_place<kChunk>(row, 2 * piece + i));
    __syncwarp();
    std::uint32_t part[3][8];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float4& four = raw[e / 4];
      const float x = e % 4 == 0 ? four.x : e % 4 == 1 ? four.y : e % 4 == 2 ? four.z : four.w;
      const bool finite = !kClean || fabsf(x) < INFINITY;
      const float rest = finite ? x - upper_half(x) : 0.0f;
      part[0][e] = kClean && isnan(x) ? 0x7fc00000u : __float_as_uint(x);
      part[1][e] = __float_as_uint(rest);
      part[2][e] = __float_as_uint(rest - upper_half(rest));
    }
    if (piece * 8 < kChunk) {
#pragma unroll
      for (int n = 0; n < 3; ++n)
        shared_at<uint4>(a + n * kChunk * kMatrixBytes + swizzled(row, piece, kMatrixBytes)) =
            make_uint4(upper_halves(part[n][0], part[n][1]), upper_halves(part[n][2], part[n][3]),
                       upper_halves(part[n][4], part[n][5]), upper_halves(part[n][6], part[n][7]));
    }
  }
}

// Two elements of a register, the first in the lower half.
template <class X>
__device__ float2 unpack_pair(std::uint32_t bits) {
  return make_float2(cuda::load_math(X{static_cast<std::uint16_t>(bits)}),
                     cuda::load_math(X{static_cast<std::uint16_t>(bits >> 16)}));
}

// b = X(x * beta), or X((x * beta) * decay), in x's place.
template <int kChunk, class X, bool kDecay>
__device__ void scale_tile(int tile, int pitch, int gates, int width) {
  constexpr int kTogether = kChunk / kRowsApart < 4 ? kChunk / kRowsApart : 4;
  const unsigned first_row = threadIdx.x / 16;
#pragma unroll
  for (unsigned first = first_row; first < kChunk; first += kTogether * kRowsApart) {
#pragma unroll
    for (unsigned piece = threadIdx.x % 16; piece < 32; piece += 16) {
      if (!has_piece(static_cast<int>(piece), width)) continue;
      uint4 x[kTogether];
#pragma unroll
      for (unsigned i = 0; i < kTogether; ++i)
        x[i] = shared_at<uint4>(tile + swizzled(first + i * kRowsApart, piece, pitch));
#pragma unroll
      for (unsigned i = 0; i < kTogether; ++i) {
        const unsigned row = first + i * kRowsApart;
        const float beta = shared_at<float>(gates + static_cast<int>(row * 4));
        const float decay =
            kDecay ? shared_at<float>(gates + static_cast<int>((kMostRows + row) * 4)) : 1.0f;
        const auto scale = [&](std::uint32_t pair) {
          const float2 of = unpack_pair<X>(pair);
          return kDecay ? cuda::store_pair<X>(of.x * beta * decay, of.y * beta * decay)
                        : cuda::store_pair<X>(of.x * beta, of.y * beta);
        };
        shared_at<uint4>(tile + swizzled(row, piece, pitch)) =
            make_uint4(scale(x[i].x), scale(x[i].y), scale(x[i].z), scale(x[i].w));
      }
    }
  }
}

// One product of a chunk and head: out = X(A b), through b's place.
template <int kChunk, class X, class M>
struct Product {
  static constexpr int kSteps = kChunk / 16;  // 16 x 16 tiles along an axis of A
  static constexpr int kPart = kChunk * kMatrixBytes;
  int a, b, pitch;  // A's parts, the largest first
  X* out;           // the result's row 0
  std::int64_t out_stride;
  int rows, width;
  bool lower;

  // Columns column .. column + kMmaSlab - 1, by one warp.
  __device__ void slab(int column) const {
    const unsigned lane = threadIdx.x % 32;
    int staged = 0;  // bit h: half h
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const int first = column + half * kMmaHalf;
      if (first < width) staged |= sum(first) << half;
    }
    __syncwarp();
    // Out in pieces: lane l has piece l % 8 of row l / 8 of 4, and reads several ahead.
    constexpr int kTogether = kChunk / 4 < 8 ? kChunk / 4 : 8;
    const unsigned mine = static_cast<unsigned>(column) / 8 + lane % 8;
    if (mine * 8 >= static_cast<unsigned>(width) || (staged >> lane / 4 % 2 & 1) == 0) return;
    auto* to = reinterpret_cast<char*>(out + lane / 8 * out_stride) + mine * kPiece;
    const std::int64_t apart = 4 * out_stride * static_cast<std::int64_t>(sizeof(X));
#pragma unroll
    for (unsigned first = lane / 8; first < kChunk; first += 4 * kTogether) {
      uint4 pieces[kTogether];
#pragma unroll
      for (unsigned i = 0; i < kTogether; ++i)
        pieces[i] = shared_at<uint4>(b + swizzled(first + 4 * i, mine, pitch));
#pragma unroll
      for (unsigned i = 0; i < kTogether; ++i) {
        if (static_cast<int>(first + 4 * i) < rows) __stcs(reinterpret_cast<uint4*>(to), pieces[i]);
        to += apart;
      }
    }
  }

  // Columns column .. column + kMmaHalf - 1, into b's place; or straight out, and 0.
  __device__ int sum(int column) const {
    const unsigned lane = threadIdx.x % 32;
    std::uint32_t of_b[kValueParts<X>][kSteps][kTilesAcross][2];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int tile = 0; tile < kTilesAcross; tile += 2) {
        std::uint32_t pairs[4];
        // Past the width's end lies the tile's own padding, which is not used.
        cuda::load_tiles_transposed(
            pairs, &shared_at<char>(
                       b + swizzled(16 * step + lane % 16, column / 8 + tile + lane / 16, pitch)));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if constexpr (kValueParts<X> == 1) {
            of_b[0][step][tile + i / 2][i % 2] = pairs[i];
          } else {
            const float2 x = unpack_pair<X>(pairs[i]);
            of_b[0][step][tile + i / 2][i % 2] =
                upper_halves(__float_as_uint(x.x), __float_as_uint(x.y));
            of_b[1][step][tile + i / 2][i % 2] = upper_halves(
                __float_as_uint(x.x - upper_half(x.x)), __float_as_uint(x.y - upper_half(x.y)));
          }
        }
      }
    }
    if constexpr (kValueParts < X >> 1) {  // inf * rest would be NaN where rest is 0
      std::uint32_t marks = 0;
      for (int tile = 0; tile < kSteps * kSteps; ++tile) {
        std::uint32_t of_a[4];
        load_matrix(of_a, 0, tile / kSteps, tile % kSteps);
        // Bit 15 or 31, if an element's exponent is all ones.
#pragma unroll
        for (int i = 0; i < 4; ++i) marks |= (of_a[i] & 0x7f807f80u) + 0x00800080u;
      }
      if (__any_sync(~0u, (marks & 0x80008000u) != 0)) {
        by_definition(column + static_cast<int>(lane));
        return 0;
      }
    }
    __syncwarp();  // every lane has read b, where the sums go
    // From the bottom: with a factor of b that is not finite, the last rows' sums are not.
#pragma unroll
    for (int down = kSteps - 1; down >= 0; --down) {
      float sums[kTilesAcross][4] = {};
      bool finite = true;
#pragma unroll
      for (int part = kMatrixParts<M> - 1; part >= 0; --part) {
#pragma unroll
        for (int n = kValueParts<X> - 1; n >= 0; --n) {
#pragma unroll
          for (int step = 0; step < kSteps; ++step) {
            std::uint32_t of_a[4];
            load_matrix(of_a, part, down, step);
#pragma unroll
            for (int tile = 0; tile < kTilesAcross; ++tile)
              cuda::multiply_bf16(sums[tile], of_a, of_b[n][step][tile]);
          }
        }
      }
      if (down == kSteps - 1) {
#pragma unroll
        for (int tile = 0; tile < kTilesAcross; ++tile)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            if (column + 8 * tile < width) finite = finite && fabsf(sums[tile][i]) < INFINITY;
        if (!__all_sync(~0u, finite)) {
          by_definition(column + lane);
          return 0;
        }
      }
#pragma unroll
      for (int tile = 0; tile < kTilesAcross; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = 16 * down + 8 * half + lane / 4;
          shared_at<std::uint32_t>(b + swizzled(row, column / 8 + tile, pitch) + lane % 4 * 4) =
              cuda::store_pair<X>(sums[tile][2 * half], sums[tile][2 * half + 1]);
        }
      }
    }
    return 1;
  }

  // This lane's elements of the 16 x 16 tile (down, across) of a part of A.
  __device__ void load_matrix(std::uint32_t (&to)[4], int part, int down, int across) const {
    const unsigned lane = threadIdx.x % 32;
    cuda::load_tiles(to, &shared_at<char>(a + part * kPart +
                                          swizzled(16 * down + lane % 16, 2 * across + lane / 16,
                                                   kMatrixBytes)));
  }

  __device__ void by_definition(int column) const {
    if (column >= width) return;
    for (int i = 0; i < rows; ++i) {
      float acc = 0;
      for (int j = 0; j < (lower ? i + 1 : rows); ++j) {
        float factor = 0;
        for (int part = kMatrixParts<M> - 1; part >= 0; --part)
          factor += cuda::load_math(
              shared_at<bf16>(a + part * kPart + swizzled(i, j / 8, kMatrixBytes) + j % 8 * 2));
        const X x = shared_at<X>(b + swizzled(j, column / 8, pitch) + column % 8 * 2);
        acc = std::fma(factor, cuda::load_math(x), acc);
      }
      out[i * out_stride + column] = cuda::store_math<X>(acc);
    }
  }
};

// kWidth: key_dim and value_dim, when they are kWide; otherwise 0.
template <int kChunk, int kWidth, class X, class M>
__global__ void __launch_bounds__(kThreads, kBlocks<kWidth, X, M>) recompute_mma(const Problem p) {
  const int key_dim = kWidth > 0 ? kWidth : p.key_dim;
  const int value_dim = kWidth > 0 ? kWidth : p.value_dim;
  const Layout layout(max(key_dim, value_dim), kChunk, kMatrixParts<M>);
  constexpr int kKeys = 0;
  for (std::int64_t index = blockIdx.x; index < p.items; index += gridDim.x) {
    const Problem::Item item = p.item(index);
    const int rows = item.chunk.rows;
    if (rows == 0) continue;
    copy_matrix<kChunk>(p, layout.matrix, static_cast<const M*>(p.a) + item.value_row * kChunk,
                        rows);
    if (p.u != nullptr) {
      copy_tile<kChunk>(layout.values, layout.pitch,
                        static_cast<const X*>(p.v) + item.value_row * value_dim,
                        p.value_heads * value_dim, rows, value_dim);
    }
    if (p.w != nullptr) {
      copy_tile<kChunk>(kKeys, layout.pitch, static_cast<const X*>(p.k) + item.key_row * key_dim,
                        p.key_heads * key_dim, rows, key_dim);
    }
    cuda::copy_async_commit();
    if (const int row = static_cast<int>(threadIdx.x); row < kChunk) {
      const std::int64_t at = item.value_row + row * p.value_heads;
      shared_at<float>(layout.gates + row * 4) = row < rows ? p.beta[at] : 0.0f;
      shared_at<float>(layout.gates + (kMostRows + row) * 4) =
          row < rows ? math::exp(p.g[at]) : 0.0f;
    }
    cuda::copy_async_wait<0>();
    __syncthreads();
    if (p.u != nullptr)
      scale_tile<kChunk, X, false>(layout.values, layout.pitch, layout.gates, value_dim);
    if (p.w != nullptr) scale_tile<kChunk, X, true>(kKeys, layout.pitch, layout.gates, key_dim);
    if constexpr (kMatrixParts < M >> 1) split_matrix<kChunk, true>(layout.matrix);
    __syncthreads();
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const bool of_keys = warp >= 2;
    void* const out = of_keys ? p.w : p.u;
    if (out != nullptr) {
      const int width = of_keys ? key_dim : value_dim;
      const Product<kChunk, X, M> product{.a = layout.matrix,
                                          .b = of_keys ? kKeys : layout.values,
                                          .pitch = layout.pitch,
                                          .out = static_cast<X*>(out) + item.value_row * width,
                                          .out_stride = p.value_heads * width,
                                          .rows = rows,
                                          .width = width,
                                          .lower = p.lower};
      for (int column = warp % 2 * kMmaSlab; column < width; column += 2 * kMmaSlab)
        product.slab(column);
    }
    __syncthreads();
  }
}

// ---- cuda_mma with products of a warpgroup (sm_90a): bf16, chunks of 64, heads of 128 ----
//
// Transposed, out^T = b^T A^T: the tensor cores read A's parts where they lie, and each warp scales
// its own columns of b on their way to registers and puts their results in their place. What counts
// is how long a block holds its shared memory: hence few barriers, items found with 32-bit indices,
// and whole chunks copied without tests of rows.
//
//   warp    i has columns 32 i .. 32 i + 31 of u, then of w, 16 at a time
//   gates   beta, then e^g. With A in f32 they come into the place of its last part, and every lane
//           has read its own before that is made: with more shared memory a block fewer would fit

constexpr int kSteps = kMostRows / 16;  // 16 x 16 tiles along an axis of A
constexpr int kTilePitch = 2 * kWide;   // bytes
constexpr int kTile = kMostRows * kTilePitch;
constexpr int kPart = kMostRows * kMatrixBytes;

template <class M>
struct WarpgroupShared {
  static constexpr int kKeys = 0, kValues = kTile, kMatrix = 2 * kTile;
  static constexpr int kGates = kMatrix + (sizeof(M) == 4 ? 2 : 1) * kPart;
  static constexpr int kGateBytes = kMostRows * sizeof(float);
  static constexpr int kBytes =
      std::max(kMatrix + kMatrixParts<M> * kPart, kGates + 2 * kGateBytes);
};
template <class M>
constexpr int kWarpgroupBlocks = sizeof(M) == 4 ? 4 : 5;  // that a multiprocessor has room for

// Of rows 16 s + 8 (e / 2) + 2 (lane % 4) + e % 2, as [s][e].
using LaneGates = float[kSteps][4];
__device__ void load_gates(LaneGates& to, int gates) {
#pragma unroll
  for (int i = 0; i < kMostRows / 8; ++i) {
    const auto pair =
        shared_at<float2>(gates + (8 * i + 2 * (static_cast<int>(threadIdx.x) % 4)) * 4);
    to[i / 2][i % 2 * 2] = pair.x;
    to[i / 2][i % 2 * 2 + 1] = pair.y;
  }
}

// A chunk's tiles, and A. kFull: all of them.
template <bool kFull, class M>
__device__ void copy_chunk(const Problem& p, const Problem::Item& item) {
  using Shared = WarpgroupShared<M>;
  const int rows = item.chunk.rows;
  copy_matrix<kMostRows, kFull>(p, Shared::kMatrix,
                                static_cast<const M*>(p.a) + item.value_row * kMostRows, rows);
  if (p.u != nullptr)
    copy_tile<kMostRows, kFull>(Shared::kValues, kTilePitch,
                                static_cast<const bf16*>(p.v) + item.value_row * kWide,
                                p.value_heads * kWide, rows, kWide);
  cuda::copy_async_commit();
  if (p.w != nullptr)
    copy_tile<kMostRows, kFull>(Shared::kKeys, kTilePitch,
                                static_cast<const bf16*>(p.k) + item.key_row * kWide,
                                p.key_heads * kWide, rows, kWide);
  cuda::copy_async_commit();
}

// The 16 columns of two pieces of A b, with the header's sums, in b's place, by a warp. Lane l has
// rows l / 16, l / 16 + 2 .. of column l % 16.
template <class M>
__device__ __noinline__ void sum_as_defined(int tile, unsigned piece, const M* a,
                                            std::int64_t stride, int rows, bool lower) {
  const unsigned lane = threadIdx.x % 32;
  const auto at = [&](int row) -> bf16& {
    return shared_at<bf16>(tile +
                           swizzled(static_cast<unsigned>(row), piece + lane / 8 % 2, kTilePitch) +
                           static_cast<int>(lane % 8 * 2));
  };
  __syncwarp();
  bf16 b[kMostRows];
  for (int j = 0; j < rows; ++j) b[j] = at(j);
  __syncwarp();
  for (int i = static_cast<int>(lane / 16); i < rows; i += 2) {
    float sum = 0;
    for (int j = 0; j < (lower ? i + 1 : rows); ++j)
      sum = std::fma(cuda::load_math(a[i * stride + j]), cuda::load_math(b[j]), sum);
    at(i) = cuda::store_math<bf16>(sum);
  }
}

// 16 columns of bf16(A b), the first or second half of the warp's, in the place of x:
// b = bf16(x * beta), or bf16(x * beta * decay).
template <class M, bool kDecay>
__device__ void multiply_columns(const Problem& p, const Problem::Item& item, int tile, int half,
                                 const LaneGates& beta, const LaneGates& decay) {
  const unsigned lane = threadIdx.x % 32, first_piece = threadIdx.x / 32 * 4;
  const int first =
      tile + (swizzled(lane % 8 + lane / 16 * 8, first_piece + lane / 8 % 2, kTilePitch) ^
              half * 2 * kPiece);
  const auto tiles = [&](int step) { return &shared_at<char>(first + step * 16 * kTilePitch); };
  std::uint32_t of_b[kSteps][4];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    cuda::load_tiles_transposed(of_b[step], tiles(step));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float2 x = unpack_pair<bf16>(of_b[step][i]);
      x.x *= beta[step][i / 2 * 2], x.y *= beta[step][i / 2 * 2 + 1];
      if constexpr (kDecay) x.x *= decay[step][i / 2 * 2], x.y *= decay[step][i / 2 * 2 + 1];
      of_b[step][i] = cuda::store_pair<bf16>(x.x, x.y);
    }
  }
  const auto matrix = cuda::warpgroup_matrix(&shared_at<char>(WarpgroupShared<M>::kMatrix));
  float sums[32] = {};
  cuda::warpgroup_begin();
#pragma unroll
  for (int part = kMatrixParts<M> - 1; part >= 0; --part)
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      cuda::warpgroup_multiply_bf16(sums, of_b[step], matrix.at(part * kPart + step * 32));
  cuda::warpgroup_end();
  std::uint32_t zeros[2] = {};  // as long as all results are finite
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    std::uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pairs[i] = cuda::store_pair<bf16>(sums[8 * step + 2 * i], sums[8 * step + 2 * i + 1]);
      zeros[i % 2] = cuda::add_zero_times_bf16(zeros[i % 2], pairs[i]);
    }
    cuda::store_tiles_transposed(tiles(step), pairs);
  }
  if (__all_sync(~0u, (zeros[0] | zeros[1]) == 0)) return;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) cuda::store_tiles_transposed(tiles(step), of_b[step]);
  sum_as_defined(tile, first_piece + static_cast<unsigned>(half) * 2,
                 static_cast<const M*>(p.a) + item.value_row * kMostRows, p.value_heads * kMostRows,
                 item.chunk.rows, p.lower);
}

// A tile's rows, each by 16 lanes: whole lines, written through, which takes 1 % off __stcs.
__device__ void store_tile(int tile, bf16* out, std::int64_t stride, int rows) {
  const unsigned first = threadIdx.x / 16, piece = threadIdx.x % 16;
  bf16* to = out + first * stride + piece * 8;
  uint4 pieces[kMostRows / 8];
#pragma unroll
  for (unsigned i = 0; i < kMostRows / 8; ++i)
    pieces[i] = shared_at<uint4>(tile + swizzled(first + 8 * i, piece, kTilePitch));
#pragma unroll
  for (unsigned i = 0; i < kMostRows / 8; ++i, to += 8 * stride)
    if (static_cast<int>(first + 8 * i) < rows) __stwt(reinterpret_cast<uint4*>(to), pieces[i]);
}

// u is made while k is still on its way.
template <class M>
__global__ void __launch_bounds__(kThreads, kWarpgroupBlocks<M>)
    recompute_warpgroup(const Problem p) {
  using Shared = WarpgroupShared<M>;
  const Problem::Item item = p.item(blockIdx.x);
  const int rows = item.chunk.rows;
  if (rows == 0) return;
  const int row = static_cast<int>(threadIdx.x) % kMostRows;
  const bool of_decay = threadIdx.x >= kMostRows;
  const float gate =
      row < rows ? (of_decay ? p.g : p.beta)[item.value_row + row * p.value_heads] : 0.0f;
  if (rows == kMostRows && !p.lower) {
    copy_chunk<true, M>(p, item);
  } else {
    copy_chunk<false, M>(p, item);
  }
  shared_at<float>(Shared::kGates + static_cast<int>(threadIdx.x) * 4) =
      of_decay ? math::exp(gate) : gate;
  cuda::copy_async_wait<1>();
  cuda::fence_shared();
  __syncthreads();
  LaneGates beta, decay;
  load_gates(beta, Shared::kGates);
  load_gates(decay, Shared::kGates + Shared::kGateBytes);
  if constexpr (kMatrixParts < M >> 1) {
    __syncthreads();
    split_matrix<kMostRows, false>(Shared::kMatrix);
    cuda::fence_shared();
    __syncthreads();
  }
  const std::int64_t stride = p.value_heads * kWide, out = item.value_row * kWide;
  if (p.u != nullptr) {
#pragma unroll 1
    for (int half = 0; half < 2; ++half)
      multiply_columns<M, false>(p, item, Shared::kValues, half, beta, decay);
  }
  cuda::copy_async_wait<0>();
  __syncthreads();
  if (p.u != nullptr) store_tile(Shared::kValues, static_cast<bf16*>(p.u) + out, stride, rows);
  if (p.w == nullptr) return;
#pragma unroll 1
  for (int half = 0; half < 2; ++half)
    multiply_columns<M, true>(p, item, Shared::kKeys, half, beta, decay);
  __syncthreads();
  store_tile(Shared::kKeys, static_cast<bf16*>(p.w) + out, stride, rows);
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
      const int device = a.k.device.index;
      const Problem p(d, a);
      if constexpr (std::is_same_v<X, bf16>) {
        if (d.chunk == 64 && d.key_dim == kWide && d.value_dim == kWide && p.items <= 0x7fffffff &&
            cuda::has_warpgroups(device)) {
          return cuda::launch(
              Op::kName, recompute_warpgroup<M>,
              {.blocks = p.items, .threads = kThreads, .shared = WarpgroupShared<M>::kBytes},
              device, stream, p);
        }
      }
      const auto launch = [&](void (*kernel)(Problem)) {
        const Layout layout(std::max(p.key_dim, p.value_dim), d.chunk, kMatrixParts<M>);
        return cuda::launch(Op::kName, kernel,
                            {.blocks = p.items,
                             .threads = kThreads,
                             .shared = static_cast<std::size_t>(layout.bytes)},
                            device, stream, p);
      };
      if (d.chunk == 64 && d.key_dim == kWide && d.value_dim == kWide)
        return launch(recompute_mma<64, kWide, X, M>);
      if (d.chunk == 64) return launch(recompute_mma<64, 0, X, M>);
      if (d.chunk == 32) return launch(recompute_mma<32, 0, X, M>);
      return launch(recompute_mma<16, 0, X, M>);
    });
  });
}

PrecisionGuarantee mma_guarantee(const Op::Desc& d) {
  PrecisionGuarantee guarantee = Op::contract(d);
  guarantee.same_bits_on_all_backends = false;
  return guarantee;
}

constexpr Kernel<Op> kKernels[] = {{.name = "cuda_mma",
                                    .backend = "cuda",
                                    .weaker = mma_guarantee,
                                    .supports = supports_mma,
                                    .architecture = cuda::architecture,
                                    .run = run_mma},
                                   cuda::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<GdnRecomputeWU>> gdn_recompute_w_u_cuda() { return kKernels; }

}  // namespace bittern
