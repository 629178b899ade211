// Functions from + - * / and sqrt, so that every platform computes the same bits.
#pragma once
#include <cstdint>

#include "core/exp_log.h"

namespace bittern::codec {

using exp_log::exp;
using exp_log::log;

// The distribution of t = x sqrt(d), x a coordinate of a random unit vector in R^d; d = 0 means its
// limit N(0, 1). The variance is 1 in either case. Every function is for t >= 0.
class Coordinate {
 public:
  explicit Coordinate(std::int64_t dim);
  double end() const { return end_; }  // of the support: sqrt(d), or where the Gaussian is nothing
  double density(double t) const;
  double tail(double t) const;          // P(T > t)
  double tail_moment(double t) const;   // E[T; T > t]
  double quantile(double upper) const;  // t with tail(t) = upper, 0 < upper <= 1/2

 private:
  std::int64_t dim_;
  double end_;
  double constant_;  // C_d
};

}  // namespace bittern::codec
