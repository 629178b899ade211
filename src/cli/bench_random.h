// Random data for benchmarks: quick, made by the threads that will use it, and the same everywhere.
#pragma once
#include <cmath>
#include <cstdint>
#include <vector>

#include "cpu/parallel.h"

namespace bittern::cli {

inline std::uint64_t random_bits(std::uint64_t x) {  // splitmix64
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// 64 Ki samples of N(0, 1), to be drawn from at random: Gaussian enough.
inline const std::vector<float>& gaussians() {
  static const std::vector<float> table = [] {
    std::vector<float> t(1 << 16);
    for (std::size_t i = 0; i < t.size(); i += 2) {
      const double u = (static_cast<double>(random_bits(i) >> 11) + 0.5) * 0x1p-53;
      const double v = (static_cast<double>(random_bits(i + 1) >> 11) + 0.5) * 0x1p-53;
      const double r = std::sqrt(-2 * std::log(u));
      t[i] = static_cast<float>(r * std::cos(2 * 3.14159265358979323846 * v));
      t[i + 1] = static_cast<float>(r * std::sin(2 * 3.14159265358979323846 * v));
    }
    return t;
  }();
  return table;
}

// Calls make(64 random bits) for each of n elements.
template <class T, class F>
void generate(void* data, std::int64_t n, std::uint64_t seed, F&& make) {
  T* to = static_cast<T*>(data);
  cpu::parallel(n, 1 << 14, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i)
      to[i] = make(random_bits(seed + static_cast<std::uint64_t>(i)));
  });
}

}  // namespace bittern::cli
