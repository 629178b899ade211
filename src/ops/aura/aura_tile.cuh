// Hadamard rows of a tuned length in registers: a lane to a row, or two or four lanes where a row
// is too long for one. Rows come and go through shared memory, so that accesses to device memory
// are 16 bytes wide and coalesced. The bits are those of aura_rotation.cuh (bittern/aura_desc.h).
#pragma once
#include <numeric>
#include <utility>

#include "bittern/aura_desc.h"
#include "cuda/ptx.cuh"
#include "cuda/runtime.cuh"
#include "ops/aura/aura.h"
#include "ops/aura/aura_lanes.cuh"

namespace bittern::cuda {

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
