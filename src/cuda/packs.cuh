// Elements in registers, as they lie in memory: N of them in 32-bit words. (Held as elements, a
// pack that may be zero instead of loaded is put together half a word at a time, which waits for
// each load before the next is issued.)
#pragma once
#include "cuda/device.cuh"

namespace bittern::cuda {

template <class X, int N>
struct Raw {
  static constexpr int kBytes = N * static_cast<int>(sizeof(X));
  static constexpr int kWords = (kBytes + 3) / 4;
  static_assert(N == 1 || kBytes % 4 == 0);
  unsigned word[kWords];

  // Zeros unless it is `there`. N elements of memory that nobody else reads; kept in the caches if
  // others do.
  template <bool kKept = false>
  __device__ static Raw load(const X* p, bool there = true) {
    Raw raw = {};
    if (!there) return raw;
    if constexpr (kBytes == 16) {
      const auto* from = reinterpret_cast<const uint4*>(p);
      const uint4 v = kKept ? __ldg(from) : __ldcs(from);
      raw.word[0] = v.x, raw.word[1] = v.y, raw.word[2] = v.z, raw.word[3] = v.w;
    } else if constexpr (kBytes == 8) {
      const auto* from = reinterpret_cast<const uint2*>(p);
      const uint2 v = kKept ? __ldg(from) : __ldcs(from);
      raw.word[0] = v.x, raw.word[1] = v.y;
    } else if constexpr (kBytes == 4) {
      raw.word[0] = *reinterpret_cast<const unsigned*>(p);
    } else {
      static_assert(kBytes == 2);
      raw.word[0] = *reinterpret_cast<const unsigned short*>(p);
    }
    return raw;
  }
  __device__ void store(X* p) const {
    if constexpr (kBytes == 16) {
      __stcs(reinterpret_cast<uint4*>(p), make_uint4(word[0], word[1], word[2], word[3]));
    } else if constexpr (kBytes == 8) {
      __stcs(reinterpret_cast<uint2*>(p), make_uint2(word[0], word[1]));
    } else if constexpr (kBytes == 4) {
      *reinterpret_cast<unsigned*>(p) = word[0];
    } else {
      *reinterpret_cast<unsigned short*>(p) = static_cast<unsigned short>(word[0]);
    }
  }

  __device__ float operator[](int i) const {
    if constexpr (std::is_same_v<X, float>) {
      return __uint_as_float(word[i]);
    } else if constexpr (std::is_same_v<X, bf16>) {
      return __uint_as_float(i % 2 == 0 ? word[i / 2] << 16 : word[i / 2] & 0xffff0000u);
    } else {
      return load_math(X{static_cast<std::uint16_t>(word[i / 2] >> 16 * (i % 2))});
    }
  }
  __device__ void widen(float (&to)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = (*this)[i];
  }
  __device__ static Raw narrow(const float (&from)[N]) {
    Raw raw;
    if constexpr (std::is_same_v<X, float>) {
#pragma unroll
      for (int i = 0; i < N; ++i) raw.word[i] = __float_as_uint(from[i]);
    } else if constexpr (N == 1) {
      raw.word[0] = store_math<X>(from[0]).bits;
    } else {
#pragma unroll
      for (int i = 0; i < N; i += 2) raw.word[i / 2] = store_pair<X>(from[i], from[i + 1]);
    }
    return raw;
  }
};

}  // namespace bittern::cuda
