// The arithmetic that the op headers promise, in plain scalar form. `ref` is made of it, and the
// other backends use it where speed does not matter.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "bittern/dtype.h"
#include "core/host_device.h"

namespace bittern {

// x / s as quantise sees it: 0 for a NaN quotient, for s = 0 and for s NaN.
template <class F>
BITTERN_HOST_DEVICE F quotient(F x, F s) {
  if (s == 0) return F(0);
  const F z = x / s;
  return std::isnan(z) ? F(0) : z;
}

// R(z) + zp. In f64 the sum of an integer-valued f32 or f64 and a 32-bit zero point is exact below
// 2^53. Above, it is outside every code range, on the right side.
template <class F>
BITTERN_HOST_DEVICE double unclamped_code(F z, std::int32_t zero_point) {
  return static_cast<double>(std::nearbyint(z)) + static_cast<double>(zero_point);
}

BITTERN_HOST_DEVICE inline bool in_range(double code, std::int32_t q_min, std::int32_t q_max) {
  return code >= q_min && code <= q_max;
}

// clamp(R(z) + zp, q_min, q_max)
template <class F>
BITTERN_HOST_DEVICE std::int32_t quantize_code(F z, std::int32_t zero_point, std::int32_t q_min,
                                               std::int32_t q_max) {
  const double code = unclamped_code(z, zero_point);
  return static_cast<std::int32_t>(
      std::min(std::max(code, static_cast<double>(q_min)), static_cast<double>(q_max)));
}

// difference * x rounded once, for any 33-bit integer difference: the product of 33 and 24 bits is
// exact in f64 up to 53 bits, and rounding it to odd first makes the second rounding harmless.
BITTERN_HOST_DEVICE inline float scaled(std::int64_t difference, float x) {
  const auto a = static_cast<double>(difference), b = static_cast<double>(x);
  double product = a * b;
  const double error = std::fma(a, b, -product);
  if (error != 0 && std::isfinite(product)) {
    auto bits = std::bit_cast<std::uint64_t>(product);
    // Truncate towards zero, then set the last bit: "odd" means "not exact".
    if ((error < 0) != (product < 0)) --bits;
    product = std::bit_cast<double>(bits | 1);
  }
  return static_cast<float>(product);
}
BITTERN_HOST_DEVICE inline double scaled(std::int64_t difference, double x) {
  return static_cast<double>(difference) * x;
}

// q * s + b as an X. Rounded once: fma, then the conversion to X. Otherwise the product and the sum
// are each rounded to X, as MLX's CPU backend does.
template <class X>
X affine_value(std::uint32_t q, Math<X> s, Math<X> b, bool once) {
  const auto code = static_cast<Math<X>>(q);
  if (once) return from_math<X>(std::fma(code, s, b));
  return from_math<X>(to_math(from_math<X>(code * s)) + b);
}

// Code j of a bit stream of `bits`-bit codes in u32 words.
inline std::uint32_t packed_code(const std::uint32_t* words, std::int64_t j, std::int64_t bits) {
  std::uint32_t code = 0;
  for (std::int64_t k = 0; k < bits; ++k) {
    const std::int64_t bit = j * bits + k;
    code |= (words[bit / 32] >> bit % 32 & 1u) << k;
  }
  return code;
}

// Sets code j, whose bits must be zero; code < 2^bits.
inline void put_packed_code(std::uint32_t* words, std::int64_t j, std::int64_t bits,
                            std::uint32_t code) {
  for (std::int64_t k = 0; k < bits; ++k) {
    const std::int64_t bit = j * bits + k;
    words[bit / 32] |= (code >> k & 1u) << bit % 32;
  }
}

// The halving tree: pad with zeros to a power of two n, then add the element n/2, n/4, ... 1 away.
// A wider vector does more of the same additions at once, so the bits do not depend on the width.
// Overwrites `terms`.
template <class F>
F halving_sum(std::vector<F>& terms) {
  if (terms.empty()) return F(0);
  terms.resize(std::bit_ceil(terms.size()), F(0));
  for (std::size_t stride = terms.size() / 2; stride > 0; stride /= 2)
    for (std::size_t i = 0; i < stride; ++i) terms[i] += terms[i + stride];
  return terms[0];
}

template <class T>
constexpr Math<T> max_finite() {
  if constexpr (std::is_same_v<T, f16>) {
    return 65504.0f;
  } else if constexpr (std::is_same_v<T, bf16>) {
    return 0x1.fep127f;
  } else {
    return std::numeric_limits<T>::max();
  }
}

}  // namespace bittern
