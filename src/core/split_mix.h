// SplitMix64: numbers that depend only on a key and a counter.
#pragma once
#include <cstdint>

namespace bittern {

inline constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15u;

inline std::uint64_t split_mix(std::uint64_t z) {  // its finaliser
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

}  // namespace bittern
