// Packs of elements as f32 and back, and packs that many threads read.
#pragma once
#include "cuda/device.cuh"

namespace bittern::cuda {

template <class X, int N>
__device__ inline void widen(const Pack<X, N>& pack, float (&to)[N]) {
  if constexpr (std::is_same_v<X, bf16> && N % 2 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const unsigned pair = reinterpret_cast<const unsigned*>(pack.at)[i / 2];
      to[i] = __uint_as_float(pair << 16);
      to[i + 1] = __uint_as_float(pair & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = load_math(pack.at[i]);
  }
}

template <class X, int N>
__device__ inline Pack<X, N> narrow(const float (&from)[N]) {
  Pack<X, N> pack;
#pragma unroll
  for (int i = 0; i < N; ++i) pack.at[i] = store_math<X>(from[i]);
  return pack;
}

template <class X, int N>
__device__ inline Pack<X, N> zeros() {
  Pack<X, N> pack;
#pragma unroll
  for (int i = 0; i < N; ++i) pack.at[i] = X{};
  return pack;
}

// K packs that follow each other, kept in the caches: others read them too.
template <int K, class X, int N>
__device__ inline void load_shared_packs(const X* from, Pack<X, N> (&to)[K]) {
#pragma unroll
  for (int k = 0; k < K; ++k) {
    if constexpr (sizeof(to[k]) == 16) {
      reinterpret_cast<uint4&>(to[k]) = __ldg(reinterpret_cast<const uint4*>(from + k * N));
    } else if constexpr (sizeof(to[k]) == 8) {
      reinterpret_cast<uint2&>(to[k]) = __ldg(reinterpret_cast<const uint2*>(from + k * N));
    } else {
      static_assert(N == 1);
      to[k].at[0] = from[k];
    }
  }
}

}  // namespace bittern::cuda
