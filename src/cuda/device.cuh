// Device side helpers shared by the *_cuda.cu files.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

#include "bittern/dtype.h"
#include "cuda/ptx.cuh"

namespace bittern::cuda {

// Exact, as to_math() on the host.
__device__ inline float load_math(float x) { return x; }
__device__ inline double load_math(double x) { return x; }
__device__ inline float load_math(f16 x) { return __half2float(__ushort_as_half(x.bits)); }
__device__ inline float load_math(bf16 x) { return __uint_as_float(std::uint32_t{x.bits} << 16); }

// As from_math() on the host: nearest even, NaN stays NaN (its payload is not promised).
template <class T>
__device__ inline T store_math(Math<T> x) {
  if constexpr (std::is_same_v<T, f16>) {
    return {__half_as_ushort(__float2half_rn(x))};
  } else if constexpr (std::is_same_v<T, bf16>) {
    return {__bfloat16_as_ushort(__float2bfloat16_rn(x))};
  } else {
    return x;
  }
}

// Two halves in one register, the first in the lower bits.
template <class T>
__device__ inline std::uint32_t store_pair(float first, float second) {
  std::uint32_t bits;
  if constexpr (std::is_same_v<T, f16>) {
    const __half2 pair = __floats2half2_rn(first, second);
    memcpy(&bits, &pair, sizeof bits);
  } else {
    static_assert(std::is_same_v<T, bf16>);
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    memcpy(&bits, &pair, sizeof bits);
  }
  return bits;
}

// The memory that Grid::shared asked for, aligned to 1024 bytes as tensor cores want it.
template <class T>
__device__ inline T* dynamic_shared() {
#ifdef BITTERN_CUDA_EMULATED
  return static_cast<T*>(emulation::dynamic_shared());
#else
  extern __shared__ __align__(1024) uint4 bittern_dynamic_shared[];
  return reinterpret_cast<T*>(bittern_dynamic_shared);
#endif
}

// n / d for 0 <= n < 2^59 and a divisor fixed on the host, as a multiplication:
// floor(n m / 2^(64+k)) with m = ceil(2^(64+k) / d) is exact when m d - 2^(64+k) <= 2^(64+k-59),
// which k = max(0, ceil(log2 d) - 5) ensures, and m then fits 64 bits. d = 1 has m = 0.
class Divisor {
 public:
  Divisor() = default;
  explicit Divisor(std::int64_t d) : value_(d) {
    if (d <= 1) return;
    int log2 = 0;
    while ((std::int64_t{1} << log2) < d) ++log2;
    shift_ = log2 > 5 ? log2 - 5 : 0;
    const auto divisor = static_cast<unsigned __int128>(d);
    multiplier_ = static_cast<std::uint64_t>(
        ((static_cast<unsigned __int128>(1) << (64 + shift_)) + divisor - 1) / divisor);
  }
  __host__ __device__ std::int64_t value() const { return value_; }
  __device__ std::int64_t divide(std::int64_t n) const {
    if (multiplier_ == 0) return n;
    return static_cast<std::int64_t>(__umul64hi(static_cast<std::uint64_t>(n), multiplier_) >>
                                     shift_);
  }

 private:
  std::int64_t value_ = 1;
  std::uint64_t multiplier_ = 0;
  int shift_ = 0;
};

// The same in 32 bits, for 0 <= n < 2^31 and 1 <= d < 2^31: floor(2 n m / 2^(32+k)) with
// k = ceil(log2 d) and m = ceil(2^(31+k) / d), which is below 2^32; n (m d - 2^(31+k)) < 2^(31+k)
// makes it exact.
class Divisor32 {
 public:
  Divisor32() = default;
  explicit Divisor32(std::int64_t d) : value_(static_cast<std::uint32_t>(d)) {
    while ((std::int64_t{1} << shift_) < d) ++shift_;
    const auto divisor = static_cast<std::uint64_t>(d);
    multiplier_ =
        static_cast<std::uint32_t>(((std::uint64_t{1} << (31 + shift_)) + divisor - 1) / divisor);
  }
  __host__ __device__ std::uint32_t value() const { return value_; }
  __device__ std::uint32_t divide(std::uint32_t n) const {
    return __umulhi(2 * n, multiplier_) >> shift_;
  }

 private:
  std::uint32_t value_ = 1;
  std::uint32_t multiplier_ = 1u << 31;
  int shift_ = 0;
};

// N elements, 16 bytes at a time where there are so many. Each is used once, so stores and narrow
// loads go past the caches (.cs); not so several loads of one lane, which share lines with each
// other, and loads of 16 bytes. Measured on an H200, to a copy's rate, with .cs and without it:
// loads of 16 bytes 0.98 and 1.03 (quantize_per_group_backward), 0.91 and 0.97
// (fake_quantize_per_group_backward, bf16), but 1.05 and 1.00 where nothing large is written
// (qdq_affine_backward); of 4 bytes 0.95 and 0.81 (dequantize_per_group).
template <class T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
  T at[N];

  // load_math(at[i]); two bf16 in a register are a shift and a mask.
  __device__ Math<T> math(int i) const {
    if constexpr (std::is_same_v<T, bf16> && N % 2 == 0) {
      std::uint32_t pair;
      memcpy(&pair, at + (i & ~1), sizeof pair);
      return __uint_as_float(i % 2 == 0 ? pair << 16 : pair & 0xffff0000u);
    } else {
      return load_math(at[i]);
    }
  }

  template <bool kPast = (sizeof(T) * N < 16)>  // the caches
  __device__ static Pack load(const T* p) {
    Pack pack;
    constexpr int kBytes = sizeof(Pack);
    if constexpr (kBytes == 16) {
      const auto* from = reinterpret_cast<const uint4*>(p);
      reinterpret_cast<uint4&>(pack) = kPast ? __ldcs(from) : load_here(from);
    } else if constexpr (kBytes % 16 == 0) {
#pragma unroll
      for (int i = 0; i < kBytes / 16; ++i)
        reinterpret_cast<uint4*>(&pack)[i] = reinterpret_cast<const uint4*>(p)[i];
    } else if constexpr (kBytes == 8) {
      reinterpret_cast<uint2&>(pack) = __ldcs(reinterpret_cast<const uint2*>(p));
    } else if constexpr (kBytes == 4) {
      reinterpret_cast<unsigned&>(pack) = __ldcs(reinterpret_cast<const unsigned*>(p));
    } else {
      static_assert(N == 1);
      pack.at[0] = *p;
    }
    return pack;
  }
  __device__ void store(T* p) const {
    constexpr int kBytes = sizeof(Pack);
    if constexpr (kBytes == 16) {
      __stcs(reinterpret_cast<uint4*>(p), reinterpret_cast<const uint4&>(*this));
    } else if constexpr (kBytes == 8) {
      __stcs(reinterpret_cast<uint2*>(p), reinterpret_cast<const uint2&>(*this));
    } else if constexpr (kBytes == 4) {
      __stcs(reinterpret_cast<unsigned*>(p), reinterpret_cast<const unsigned&>(*this));
    } else if constexpr (kBytes == 2) {
      __stcs(reinterpret_cast<unsigned short*>(p), reinterpret_cast<const unsigned short&>(*this));
    } else {
      static_assert(N == 1);
      *p = at[0];
    }
  }
};

// May rows of N elements at `data`, `stride` elements apart, be read and written as packs?
template <class T, int N>
bool packs_aligned(const void* data, std::int64_t rows, std::int64_t stride) {
  constexpr std::uintptr_t kAlign = alignof(Pack<T, N>);
  const auto step = static_cast<std::uintptr_t>(stride) * sizeof(T);
  return reinterpret_cast<std::uintptr_t>(data) % kAlign == 0 && (rows <= 1 || step % kAlign == 0);
}

// f(std::integral_constant<int, bits>) for bits in 1..8.
template <class F>
constexpr auto visit_bits(int bits, F&& f) {
  switch (bits) {
    case 1: return f(std::integral_constant<int, 1>());
    case 2: return f(std::integral_constant<int, 2>());
    case 3: return f(std::integral_constant<int, 3>());
    case 4: return f(std::integral_constant<int, 4>());
    case 5: return f(std::integral_constant<int, 5>());
    case 6: return f(std::integral_constant<int, 6>());
    case 7: return f(std::integral_constant<int, 7>());
    default: return f(std::integral_constant<int, 8>());
  }
}

// Where a piece of 16 bytes lies in tiles of kRows rows of 128 bytes, one tile after the other,
// whose pieces are permuted as WarpgroupMatrix (ptx.cuh) wants them.
inline constexpr int kTileRowBytes = 128, kTileBytes64 = 64 * kTileRowBytes;
template <int kRows = 64>
__device__ inline int tile_place(int row, int piece) {
  return piece / 8 * (kRows * kTileRowBytes) + row * kTileRowBytes + ((piece % 8) ^ (row % 8)) * 16;
}

// How a block of one warpgroup that copies and kGroups that compute shares out its registers: so
// many for each thread. A warpgroup waits for ever for registers that the block did not start with.
// These are the most that its threads can have, in eights, which is not all of a multiprocessor's.
template <int kGroups, int kCopying, int kComputing>
struct RegisterShares {
  static constexpr int kWarpgroups = kGroups + 1;
  static_assert(kCopying + kGroups * kComputing <=
                65536 / (128 * kWarpgroups) / 8 * 8 * kWarpgroups);
  __device__ static void copy() { give_registers<kCopying>(); }
  __device__ static void compute() { take_registers<kComputing>(); }
};

}  // namespace bittern::cuda
