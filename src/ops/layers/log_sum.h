// The logarithm that ends log_softmax, for every kernel.
#pragma once
#include <cmath>
#include <limits>

#include "core/exp_log.h"

namespace bittern {

// A sum of exponentials is at least 1, unless something was NaN or infinite.
inline float log_of_sum(double sum) {
  if (!(sum >= 1) || std::isinf(sum)) return std::numeric_limits<float>::quiet_NaN();
  return static_cast<float>(exp_log::log(sum));
}

}  // namespace bittern
