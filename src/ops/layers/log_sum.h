// Sums over a vocabulary in f64 and their logarithms, for every kernel of log_softmax and kl_loss.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/exp_log.h"
#include "core/numerics.h"

namespace bittern {

// The order: the elements of a block go to chains, element j to chain j mod kLogSumChains, which
// the halving tree adds; the blocks are added in order.
inline constexpr std::int64_t kLogSumBlock = 4096;
inline constexpr std::int64_t kLogSumChains = 16;

// term(j) for j in [0, n), summed in this order.
template <class Term>
double chain_sum(std::int64_t n, const Term& term) {
  double sum = 0;
  for (std::int64_t first = 0; first < n; first += kLogSumBlock) {
    std::vector<double> chains(static_cast<std::size_t>(kLogSumChains), 0.0);
    for (std::int64_t j = first; j < std::min(n, first + kLogSumBlock); ++j)
      chains[static_cast<std::size_t>(j % kLogSumChains)] += static_cast<double>(term(j));
    sum += halving_sum(chains);
  }
  return sum;
}

// -infinity for 0; NaN for what no sum of finite exponentials is.
inline double log64(double sum) {
  if (sum == 0) return -std::numeric_limits<double>::infinity();
  if (!(sum > 0) || std::isinf(sum)) return std::numeric_limits<double>::quiet_NaN();
  return exp_log::log(sum);
}

// A sum of exponentials is at least 1, unless something was NaN or infinite.
inline float log_of_sum(double sum) {
  if (!(sum >= 1)) return std::numeric_limits<float>::quiet_NaN();
  return static_cast<float>(log64(sum));
}

}  // namespace bittern
