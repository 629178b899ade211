// The KV codec's rows on the device, in ways that give the same bits (bittern/aura_desc.h):
//
//   a warp to a row     any length and rotation, in shared memory: rotate_by_warp(); of a dense
//                       rotation, a block to many rows: DenseBlock
//   a lane to a row     hadamard rows of a tuned length, in registers: RowTile. (Two or four lanes
//                       share a row that is too long for one.) Rows come and go through shared
//                       memory, so that accesses to device memory are 16 bytes wide and coalesced.
#pragma once
#include <bit>
#include <numeric>
#include <utility>

#include "bittern/aura_desc.h"
#include "cuda/device.cuh"
#include "cuda/ptx.cuh"
#include "cuda/runtime.cuh"
#include "ops/aura/aura.h"

namespace bittern::cuda {

inline constexpr unsigned kAllLanes = ~0u;

__device__ inline int lane_index() { return static_cast<int>(threadIdx.x % 32); }
// The same, about which neither compiler knows anything: what is computed from it in a loop is not
// moved in front of the loop, where it would take registers.
__device__ inline int lane_again() {
  return __shfl_sync(kAllLanes, lane_index(), lane_index()) & 31;
}
__device__ inline int warp_index() { return static_cast<int>(threadIdx.x / 32); }

// ---- elements whose dtype is known at run time ----

__device__ inline float load_element(const void* p, DType type, std::int64_t i) {
  switch (type) {
    case DType::f16: return load_math(static_cast<const f16*>(p)[i]);
    case DType::bf16: return load_math(static_cast<const bf16*>(p)[i]);
    default: return static_cast<const float*>(p)[i];
  }
}
__device__ inline void store_element(void* p, DType type, std::int64_t i, float value) {
  switch (type) {
    case DType::f16: static_cast<f16*>(p)[i] = store_math<f16>(value); break;
    case DType::bf16: static_cast<bf16*>(p)[i] = store_math<bf16>(value); break;
    default: static_cast<float*>(p)[i] = value;
  }
}

// ---- sums in the order of the halving tree ----

__device__ inline float across(float x, int step) { return __shfl_xor_sync(kAllLanes, x, step); }
// A lane's sum and those of the lanes that differ from it in the bits `most`, ... `least`.
__device__ inline float sum_across(float sum, int most, int least = 1) {
#pragma unroll
  for (int step = most; step >= least; step /= 2) sum += across(sum, step);
  return sum;
}

// Of leaf(first), leaf(first + step), ... below kCount: the last addition joins the leaves that
// differ in the lowest bit, the first ones those that differ in the highest. Zeros that pad a tree
// are not added: that could only turn -0 into 0.
template <int kFirst, int kStep, int kCount, class Leaf>
__device__ inline auto halving_sum(const Leaf& leaf) {
  if constexpr (kFirst + kStep >= kCount) {
    return leaf(kFirst);
  } else {
    const auto even = halving_sum<kFirst, 2 * kStep, kCount>(leaf);
    return even + halving_sum<kFirst + kStep, 2 * kStep, kCount>(leaf);
  }
}

// ---- a warp to a row ----

// A rotation, as a kernel's parameter.
struct RowRotation {
  const float* table = nullptr;
  Rotation kind = Rotation::identity;
  bool inverse = false;
  int dim = 0, factor = 1, block = 0;  // d, m, n
  float scale = 1;                     // d^-1/2
  // H_m, or its transpose if `inverse`: bit c of negative[a] is set where entry [a, c] is -1.
  std::uint64_t negative[60] = {};
};

inline RowRotation row_rotation(Rotation kind, std::int64_t dim, const float* table, bool inverse) {
  RowRotation r{.table = table, .kind = kind, .inverse = inverse, .dim = static_cast<int>(dim)};
  if (kind != Rotation::hadamard) return r;
  r.factor = static_cast<int>(hadamard_factor(dim));
  r.block = r.dim / r.factor;
  r.scale = hadamard_scale(dim);
  const float* h = hadamard_matrix(r.factor);
  for (int a = 0; a < r.factor; ++a)
    for (int c = 0; c < r.factor; ++c)
      if (h[inverse ? c * r.factor + a : a * r.factor + c] < 0)
        r.negative[a] |= std::uint64_t{1} << c;
  return r;
}

// P (factor row), or its inverse, of a row in shared memory where lane l has written the elements
// of j % 32 = l. The result is in `row` or in `spare`, which holds as much: the one that is
// returned. Any lane may read it.
__device__ inline float* rotate_by_warp(const RowRotation& p, float* row, float* spare,
                                        float factor = 1) {
  const int lane = lane_index();
  const float scale = factor * (p.kind == Rotation::hadamard ? p.scale : 1);
  const bool has_signs = p.kind == Rotation::hadamard && !p.inverse;
  for (int j = lane; j < p.dim; j += 32) row[j] *= has_signs ? p.table[j] * scale : scale;
  __syncwarp();
  if (p.kind == Rotation::identity) return row;
  if (p.kind == Rotation::dense) {
    const std::int64_t step = p.inverse ? p.dim : 1;
    for (int i = lane; i < p.dim; i += 32) {
      const float* matrix = p.table + std::int64_t{i} * (p.inverse ? 1 : p.dim);
      float acc = 0;
      for (int j = 0; j < p.dim; ++j) acc = fmaf(__ldg(matrix + j * step), row[j], acc);
      spare[i] = acc;
    }
    __syncwarp();
    return spare;
  }
  const auto butterflies = [&] {
    for (int h = 1; h < p.block; h *= 2) {
      for (int i = lane; i < p.dim / 2; i += 32) {
        const int j = 2 * i - (i & (h - 1));  // i with a zero bit put in at h
        const float a = row[j], b = row[j + h];
        row[j] = a + b;
        row[j + h] = a - b;
      }
      __syncwarp();
    }
  };
  if (!p.inverse) butterflies();
  if (p.factor > 1) {
    for (int i = lane; i < p.dim; i += 32) {
      const int a = i / p.block, b = i & (p.block - 1);
      float acc = 0;
      for (int c = 0; c < p.factor; c += 4) {
        const auto h = static_cast<unsigned>(p.negative[a] >> c);
        const auto t = [&](int e) { return row[(c + e) * p.block + b]; };
        const auto differ = [&](int e, int f) { return ((h >> e ^ h >> f) & 1) != 0; };
        const float low = differ(0, 1) ? t(0) - t(1) : t(0) + t(1);
        const float high = differ(2, 3) ? t(2) - t(3) : t(2) + t(3);
        const float four = differ(0, 2) ? low - high : low + high;
        const float signed_four = (h & 1) != 0 ? -four : four;
        acc = c == 0 ? signed_four : acc + signed_four;
      }
      spare[i] = acc;
    }
    __syncwarp();
    float* const result = spare;
    spare = row;
    row = result;
  }
  if (p.inverse) {
    butterflies();
    for (int j = lane; j < p.dim; j += 32) row[j] *= p.table[j];
    __syncwarp();
  }
  return row;
}

// ---- a block to many rows of a dense rotation ----

// Eight rows to a warp, P through shared memory in tiles of [32 j, 128 i]. A lane has the sums of 8
// rows x 4 columns i = lane + 32 q, so that 24 reads of shared memory feed 128 fma.
struct DenseBlock {
  static constexpr int kRows = 8;  // of a warp
  static constexpr int kDepth = 32, kWidth = 128, kTileStride = kWidth + 1;
  static constexpr int kTileBytes = (kDepth * kTileStride * 4 + 15) / 16 * 16;
  static constexpr int kMostWarps = 8;

  int stride;  // floats from row to row
  int warps;
  std::size_t shared;  // bytes

  // Of a kernel that keeps x and y for each row and `extra` bytes for each warp.
  static DenseBlock plan(int dim, int extra, int device) {
    DenseBlock b{.stride = (dim + 3) / 4 * 4};
    const int warp = 2 * kRows * b.stride * 4 + extra;
    const int room = static_cast<int>(limits(device).shared_per_block) - kTileBytes;
    b.warps = std::min(kMostWarps, room / warp);
    b.shared = static_cast<std::size_t>(kTileBytes + b.warps * warp);
    return b;
  }

  // y := P x, or its inverse, for the rows [kRows, stride] of each warp, by the whole block.
  __device__ void rotate(const RowRotation& p, const float* x, float* y, float* tile) const {
    const int lane = lane_index(), threads = static_cast<int>(blockDim.x);
    for (int first = 0; first < p.dim; first += kWidth) {
      const int width = p.dim - first < kWidth ? p.dim - first : kWidth;
      float acc[kRows][4] = {};
      for (int from = 0; from < p.dim; from += kDepth) {
        const int depth = p.dim - from < kDepth ? p.dim - from : kDepth;
        __syncthreads();
        // Along rows of the table: j for P, i for its transpose.
        for (int at = static_cast<int>(threadIdx.x); at < kDepth * kWidth; at += threads) {
          const int i = p.inverse ? at % kWidth : at / kDepth;
          const int j = p.inverse ? at / kWidth : at % kDepth;
          if (i >= width || j >= depth) continue;
          const std::int64_t row = p.inverse ? from + j : first + i;
          tile[j * kTileStride + i] =
              __ldg(p.table + row * p.dim + (p.inverse ? first + i : from + j));
        }
        __syncthreads();
        for (int j = 0; j < depth; j += 4) {
          float4 t[kRows];
#pragma unroll
          for (int r = 0; r < kRows; ++r)
            t[r] = *reinterpret_cast<const float4*>(x + r * stride + from + j);
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            if (j + k >= depth) break;
            float column[4];
#pragma unroll
            for (int q = 0; q < 4; ++q) column[q] = tile[(j + k) * kTileStride + lane + 32 * q];
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
              const float u = k == 0 ? t[r].x : k == 1 ? t[r].y : k == 2 ? t[r].z : t[r].w;
#pragma unroll
              for (int q = 0; q < 4; ++q) acc[r][q] = fmaf(column[q], u, acc[r][q]);
            }
          }
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int q = 0; q < 4; ++q)
          if (lane + 32 * q < width) y[r * stride + first + lane + 32 * q] = acc[r][q];
      }
    }
    __syncwarp();
  }
};

// ---- H_m at compile time ----

// chi(a mod q)
constexpr int legendre(int a, int q) {
  a = (a % q + q) % q;
  if (a == 0) return 0;
  for (int x = 1; x < q; ++x)
    if (x * x % q == a) return 1;
  return -1;
}
// Is entry [i, j] of Paley's matrix of order m -1?
constexpr bool paley_negative(int m, int i, int j) {
  const bool first_kind = m != 28 && m != 36;
  const int order = first_kind ? m : m / 2;
  const int a = i % order, b = j % order;
  const bool lower = i >= order, right = j >= order;
  const int identity = a == b ? 1 : 0;
  const int left = first_kind ? -1 : 1;
  const int c = a == 0 || b == 0 ? (a == b ? 0 : a == 0 ? 1 : left) : legendre(b - a, order - 1);
  return (lower && right ? -1 : 1) * c + (lower || right ? -1 : 1) * identity < 0;
}

// a + b or a - b
template <bool kPlus>
__device__ inline float join(float a, float b) {
  return kPlus ? a + b : a - b;
}
// Many rows have the same G_k: the compiler computes each once.
template <int kOrder, bool kTransposed, int kRow, int kFour>
__device__ inline float add_four(float acc, const float (&t)[kOrder]) {
  constexpr auto negative = [](int i) {
    const int column = 4 * kFour + i;
    return paley_negative(kOrder, kTransposed ? column : kRow, kTransposed ? kRow : column);
  };
  constexpr bool kLow = negative(0) == negative(1), kHigh = negative(2) == negative(3),
                 kBoth = negative(0) == negative(2);
  constexpr int c = 4 * kFour;
  const float four = join<kBoth>(join<kLow>(t[c], t[c + 1]), join<kHigh>(t[c + 2], t[c + 3]));
  if constexpr (kFour == 0) return negative(0) ? -four : four;
  return join<!negative(0)>(acc, four);
}
template <int kOrder, bool kTransposed, int kRow, int... kFour>
__device__ inline float paley_row(const float (&t)[kOrder], std::integer_sequence<int, kFour...>) {
  float acc = 0;
  ((acc = add_four<kOrder, kTransposed, kRow, kFour>(acc, t)), ...);
  return acc;
}
template <int kOrder, bool kTransposed, int... kRow>
__device__ inline void paley_product(const float (&t)[kOrder], float (&y)[kOrder],
                                     std::integer_sequence<int, kRow...>) {
  ((y[kRow] =
        paley_row<kOrder, kTransposed, kRow>(t, std::make_integer_sequence<int, kOrder / 4>())),
   ...);
}

// ---- a lane to a row ----

// Rows of kDim elements, each held by kLanes neighbouring lanes. Register 8k + e of the lane whose
// `part` is l % kLanes holds element 8 ((k kLanes + part) ^ turn) + e: 16-byte pieces dealt out in
// turn. A `Permuted` tile's rows lie in shared memory without gaps, so that one bulk copy moves all
// of them; there `turn` differs from lane to lane, to the effect that lanes which read or write
// their k-th pieces, or their k-th words of 4-bit codes, meet every bank once.
template <int kDim, int kLanes, bool kPermuted = false>
struct RowTile {
  using Permuted = RowTile<kDim, kLanes, true>;
  static constexpr int kFactor = static_cast<int>(hadamard_factor(kDim));
  static constexpr int kBlock = kDim / kFactor;
  static constexpr int kEach = kDim / kLanes;
  static constexpr int kChunks = kEach / 8;
  static constexpr int kRows = 32 / kLanes;  // of a warp
  static_assert(kFactor != 0 && kDim % (8 * kLanes) == 0);
  static_assert(kLanes == 1 || kBlock % (8 * kLanes) == 0);  // H_m mixes within a lane

  // Bytes from row to row in shared memory. An odd multiple of kLanes 16-byte pieces: eight
  // lanes reading 16 bytes each then meet every bank once.
  template <class X>
  static constexpr int kRowBytes = static_cast<int>(kDim * sizeof(X));
  template <class X>
  static constexpr int kStageStride =
      !kPermuted && kRowBytes<X> / 16 / kLanes % 2 == 0 ? kRowBytes<X> + 16 * kLanes : kRowBytes<X>;

  static constexpr bool kTurns = kPermuted && kFactor == 1;
  __device__ static int row(int lane = lane_index()) {
    const int i = lane / kLanes;
    if constexpr (kTurns && kRows > kChunks) return i % kChunks * (kRows / kChunks) + i / kChunks;
    return i;
  }
  __device__ static int part(int lane = lane_index()) { return lane % kLanes; }
  __device__ static int turn(int lane = lane_index()) {
    return kTurns ? lane / kLanes % kChunks * kLanes : 0;
  }
  __device__ static int first_of_chunk(int k, int lane = lane_index()) {
    return 8 * ((k * kLanes + part(lane)) ^ turn(lane));
  }
  // This lane's chunks, of kBytes each, in rows `stride` bytes apart: at(k) is chunk k. Without
  // gaps, rows begin at multiples of their length from the start of shared memory.
  template <int kBytes>
  struct Chunks {
    int first;
    __device__ Chunks(const char* rows, int stride)
        : Chunks(rows, stride, kTurns ? lane_again() : lane_index()) {}
    __device__ Chunks(const char* rows, int stride, int lane)
        : first(static_cast<int>(rows - dynamic_shared<char>()) + row(lane) * stride +
                (part(lane) ^ turn(lane)) * kBytes) {}
    __device__ char* at(int k) const {
      const int step = k * kLanes * kBytes;
      return dynamic_shared<char>() + (kTurns ? first ^ step : first + step);
    }
  };

  // The 16-byte pieces of kRows rows of kBytes, by a warp: lane l has piece l % kWide of row
  // l / kWide, and those that lie rows and pieces after it: f(i, j) for i rows and j pieces.
  template <int kBytes>
  struct Pieces {
    static constexpr int kAll = kBytes / 16;
    static constexpr int kWide = std::gcd(32, kAll), kTall = 32 / kWide;
    static_assert(kRows % kTall == 0);
    int row, piece;
    __device__ explicit Pieces(unsigned lane)
        : row(static_cast<int>(lane / kWide)), piece(static_cast<int>(lane % kWide)) {}
    template <class F>
    __device__ static void each(const F& f) {
#pragma unroll
      for (int i = 0; i < kRows; i += kTall) {
#pragma unroll
        for (int j = 0; j < kAll; j += kWide) f(i, j);
      }
    }
  };
  // Starts copying `rows` rows from device memory, `stride` bytes apart; others become zeros.
  template <int kBytes, int kTo>
  __device__ static void fetch_bytes(char* stage, const char* from, std::int64_t stride, int rows,
                                     unsigned lane = threadIdx.x % 32) {
    using P = Pieces<kBytes>;
    const P at(lane);
    char* const to = stage + at.row * kTo + 16 * at.piece;
    const char* const mine = opaque(from + at.row * stride + 16 * at.piece);
    if (rows >= kRows && stride == kBytes) {  // then addresses are constants away
      P::each(
          [&](int i, int j) { copy_async_16(to + i * kTo + 16 * j, mine + i * kBytes + 16 * j); });
    } else {
      P::each([&](int i, int j) {
        const bool there = i + at.row < rows;
        copy_async_16(to + i * kTo + 16 * j, there ? mine + i * stride + 16 * j : from,
                      there ? 16 : 0);
      });
    }
    copy_async_commit();
  }
  template <class X>
  __device__ static void fetch(char* stage, const char* from, std::int64_t stride, int rows) {
    fetch_bytes<kRowBytes<X>, kStageStride<X>>(stage, from, stride, rows);
  }
  template <class X>
  __device__ static void put_out(const char* stage, char* to, std::int64_t stride, int rows,
                                 unsigned lane = threadIdx.x % 32) {
    using P = Pieces<kRowBytes<X>>;
    const P at(lane);
    const char* const from = stage + at.row * kStageStride<X> + 16 * at.piece;
    char* const mine = opaque(to + at.row * stride + 16 * at.piece);
    const auto move = [&](int i, int j, std::int64_t row_bytes) {
      __stcs(reinterpret_cast<uint4*>(mine + i * row_bytes + 16 * j),
             *reinterpret_cast<const uint4*>(from + i * kStageStride<X> + 16 * j));
    };
    if (rows >= kRows && stride == kRowBytes<X>) {
      P::each([&](int i, int j) { move(i, j, kRowBytes<X>); });
    } else {
      P::each([&](int i, int j) {
        if (i + at.row < rows) move(i, j, stride);
      });
    }
  }

  // Starts copying `rows` rows of kBytes, without gaps in shared memory. They are there, for the
  // whole warp, after arrived().
  template <int kBytes>
  __device__ static void begin_fetch(BulkCopiesIn& copies, char* stage, const char* from,
                                     std::int64_t stride, int rows) {
    static_assert(kPermuted);
    const unsigned lane = opaque(threadIdx.x % 32);
    if constexpr (kHasBulkCopies) {
      const int mine = static_cast<int>(lane);
      if (mine == 0) copies.expect(rows * kBytes);
      if (stride == kBytes) {
        if (mine == 0) copies.start(stage, from, rows * kBytes);
      } else if (mine < rows) {
        copies.start(stage + mine * kBytes, from + mine * stride, kBytes);
      }
    } else {
      fetch_bytes<kBytes, kBytes>(stage, from, stride, rows, lane);
    }
  }
  __device__ static void arrived(BulkCopiesIn& copies) {
    if constexpr (kHasBulkCopies) {
      copies.wait();
    } else {
      copy_async_wait<0>();
      __syncwarp();
    }
  }

  // Starts copying `rows` rows to device memory, where they are `stride` bytes apart, by one bulk
  // copy if they can be. Before `stage` is written again: sent().
  template <class X>
  __device__ static void send(const char* stage, char* to, std::int64_t stride, int rows) {
    static_assert(kPermuted);
    if (kHasBulkCopies && stride == kRowBytes<X>) {
      fence_shared();
      __syncwarp();
      if (lane_index() == 0) bulk_copy_out(to, stage, rows * kRowBytes<X>);
    } else {
      __syncwarp();
      put_out<X>(stage, to, stride, rows, opaque(threadIdx.x % 32));
    }
  }
  __device__ static void sent() {
    bulk_copy_out_wait();
    __syncwarp();
  }

  // The signs of this lane's elements, as bits: bit 15 - p of a word is that of register 2p, bit
  // 31 - p that of register 2p + 1, p below 16; so a shift by p puts them where a pair of 16-bit
  // elements has its signs.
  struct Signs {
    std::uint32_t word[(kEach + 31) / 32] = {};

    // All positive without a table. By a whole warp.
    __device__ static Signs of(const float* table) {
      Signs signs;
      if (table == nullptr) return signs;
      // Of element j: bit j % 32 of what lane j / 32 holds.
      std::uint32_t held = 0;
#pragma unroll
      for (int first = 0; first < kDim; first += 32) {
        const int j = first + lane_index();
        const unsigned negative = __ballot_sync(kAllLanes, j < kDim && table[j] < 0);
        if (lane_index() == first / 32) held = negative;
      }
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        const int first = first_of_chunk(k);
        const unsigned eight = __shfl_sync(kAllLanes, held, first / 32) >> first % 32;
        // Bits 0, 2, 4, 6 to 16 ... 19; 1, 3, 5, 7 to 0 ... 3.
        unsigned bits = (eight & 0x55) << 16 | (eight >> 1 & 0x55);
        bits = (bits | bits >> 1) & 0x00330033u;
        bits = (bits | bits >> 2) & 0x000f000fu;
        signs.word[k / 4] |= __brev(bits) >> k % 4 * 4;
      }
      return signs;
    }
    // For one pass of a loop: see opaque().
    __device__ Signs again() const {
      Signs signs;
#pragma unroll
      for (int i = 0; i < (kEach + 31) / 32; ++i) signs.word[i] = opaque(word[i]);
      return signs;
    }
    __device__ std::uint32_t of_pair(int i) const {
      return word[i / 32] << i % 32 / 2 & 0x80008000u;
    }
    __device__ std::uint32_t of_element(int i) const {
      return word[i / 32] << (i % 32 / 2 + (i % 2 == 0 ? 16 : 0)) & 0x80000000u;
    }
  };

  // Between shared memory and this lane's registers, with the signs of some elements turned.
  template <class X>
  __device__ static void load(const char* stage, const Signs& signs, float (&x)[kEach]) {
    const Chunks<8 * sizeof(X)> chunks(stage, kStageStride<X>);
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const auto* chunk = reinterpret_cast<const uint4*>(chunks.at(k));
      if constexpr (sizeof(X) == 4) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint4 words = chunk[half];
          const unsigned word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int i = 8 * k + 4 * half + e;
            x[i] = __uint_as_float(word[e] ^ signs.of_element(i));
          }
        }
      } else {
        const uint4 words = chunk[0];
        const unsigned pair[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int i = 8 * k + 2 * e;
          const unsigned turned = pair[e] ^ signs.of_pair(i);
          x[i] = load_math(X{static_cast<std::uint16_t>(turned)});
          x[i + 1] = load_math(X{static_cast<std::uint16_t>(turned >> 16)});
        }
      }
    }
  }
  template <class X>
  __device__ static void store(const float (&x)[kEach], const Signs& signs, char* stage) {
    const Chunks<8 * sizeof(X)> chunks(stage, kStageStride<X>);
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      auto* chunk = reinterpret_cast<uint4*>(chunks.at(k));
      if constexpr (sizeof(X) == 4) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const auto word = [&](int e) {
            const int i = 8 * k + 4 * half + e;
            return __float_as_uint(x[i]) ^ signs.of_element(i);
          };
          chunk[half] = make_uint4(word(0), word(1), word(2), word(3));
        }
      } else {
        unsigned pair[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int i = 8 * k + 2 * e;
          pair[e] = store_pair<X>(x[i], x[i + 1]) ^ signs.of_pair(i);
        }
        chunk[0] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
      }
    }
  }

  // Step 2 of the hadamard rotation. Where lanes differ in which is a and which b, or in which of
  // a + b and a - b they want, fma by +-1 is that sum.
  __device__ static void butterflies(float (&t)[kEach]) {
    const int turned = kTurns ? turn(lane_again()) : 0;
#pragma unroll
    for (int h = 1; h < kBlock; h *= 2) {
      if (h >= 8 && h < 8 * kLanes) {
        const float sign = (part() & h / 8) != 0 ? -1.0f : 1.0f;
#pragma unroll
        for (int i = 0; i < kEach; ++i) t[i] = fmaf(t[i], sign, across(t[i], h / 8));
      } else {
        const int step = h < 8 ? h : h / kLanes;
        const bool turns = kTurns && h >= 8;
        const float sign = (turned & h / 8) != 0 ? -1.0f : 1.0f;
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          if ((i & step) != 0) continue;
          const float a = t[i], b = t[i + step];
          t[i] = turns ? fmaf(a, sign, b) : a + b;
          t[i + step] = turns ? fmaf(b, -sign, a) : a - b;
        }
      }
    }
  }
  // Step 3: H_m, or its transpose, on the registers seen as [m, n / kLanes].
  template <bool kInverse>
  __device__ static void mix(float (&t)[kEach]) {
    if constexpr (kFactor > 1) {
      constexpr int kColumns = kBlock / kLanes;
#pragma unroll
      for (int b = 0; b < kColumns; ++b) {
        float column[kFactor], mixed[kFactor];
#pragma unroll
        for (int c = 0; c < kFactor; ++c) column[c] = t[c * kColumns + b];
        paley_product<kFactor, kInverse>(column, mixed, std::make_integer_sequence<int, kFactor>());
#pragma unroll
        for (int c = 0; c < kFactor; ++c) t[c * kColumns + b] = mixed[c];
      }
    }
  }
};

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

// A warp to a row serves small problems and whatever has no tile.
inline constexpr int kWarpsOfRows = 8;  // of a block of such warps
inline constexpr int kFewRows = 4;      // a multiprocessor: no more than these are left to them

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

// f(RowTile) for a tuned length, otherwise() for any other. Rows of 128 and 256 have kEach elements
// to a lane, 64 or 128: fewer leave room for more warps and cost a shuffle more for each.
template <int kEach, class F, class Otherwise>
Status visit_tuned_dim(std::int64_t dim, F&& f, Otherwise&& otherwise) {
  switch (dim) {
    case 64: return f(RowTile<64, 1>());
    case 80: return f(RowTile<80, 1>());
    case 128: return f(RowTile<128, 128 / kEach>());
    case 256: return f(RowTile<256, 256 / kEach>());
    case 512: return f(RowTile<512, 4>());
    default: return otherwise();
  }
}

}  // namespace bittern::cuda
