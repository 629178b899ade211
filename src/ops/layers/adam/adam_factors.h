// What a step of Adam multiplies by: the same for all elements.
#pragma once
#include <cmath>
#include <cstdint>

#include "bittern/layers_desc.h"

namespace bittern {

// By repeated squaring: no libm promises the bits of pow.
inline double whole_power(double base, std::int64_t exponent) {
  double power = 1;
  for (; exponent > 0; exponent >>= 1, base *= base)
    if ((exponent & 1) != 0) power *= base;
  return power;
}

struct AdamFactors {
  float beta1, rest1, beta2, rest2;
  float rate, inverse_root, epsilon;

  explicit AdamFactors(const AdamDesc& d)
      : beta1(static_cast<float>(d.beta1)),
        rest1(static_cast<float>(1 - d.beta1)),
        beta2(static_cast<float>(d.beta2)),
        rest2(static_cast<float>(1 - d.beta2)),
        rate(static_cast<float>(d.rate / (1 - whole_power(d.beta1, d.step)))),
        inverse_root(static_cast<float>(1 / std::sqrt(1 - whole_power(d.beta2, d.step)))),
        epsilon(static_cast<float>(d.epsilon)) {}
};

}  // namespace bittern
