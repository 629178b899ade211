// What the bounds of kernels cpu_bf16 are relative to (the ops' headers): the sum of the magnitudes
// of an element's terms, for the judges.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

namespace bittern::oracle {

class Bf16Unit {
 public:
  // A term: the product of two numbers with these magnitudes.
  void add(double a, double b) {
    if (std::isfinite(a) && std::isfinite(b)) {
      promised_ = promised_ && a < kMost && b < kMost;
      if (a > 0 && b > 0) sum_ += std::max(a, kLeast) * std::max(b, kLeast);
    } else {
      finite_ = false;
      promised_ = promised_ && !(std::isinf(a) && b < kNormal) && !(std::isinf(b) && a < kNormal);
    }
  }
  // A term: `factor` times a sum of its own.
  void add(double factor, const Bf16Unit& sum) {
    promised_ = promised_ && !std::isinf(sum.value());
    finite_ = finite_ && sum.finite_;
    sum_ += factor * sum.sum_;
  }

  // As Judge takes it: NaN if a term is not finite, infinite if nothing is promised.
  double value() const {
    if (!promised_ || sum_ >= kMost) return std::numeric_limits<double>::infinity();
    return finite_ ? sum_ : std::numeric_limits<double>::quiet_NaN();
  }

 private:
  static constexpr double kLeast = 0x1p-100, kMost = 0x1p127, kNormal = 0x1p-126;
  double sum_ = kLeast;
  bool finite_ = true, promised_ = true;
};

}  // namespace bittern::oracle
