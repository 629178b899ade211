// H = the sum of x x^T over the inputs x of a product: what an error of its weights costs.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "bittern/tensor.h"
#include "distill/linear_algebra.h"

namespace bittern {

class Gram {
 public:
  explicit Gram(std::int64_t inputs) : sums_(inputs) {}

  // Adds weight x x^T for each row of x, f32 [rows, inputs]; without weights, x x^T. Products are
  // summed in f32 over up to 256 rows, by fma with rows ascending, and those sums in f64.
  void add(const ConstView& x, std::span<const float> weights = {});

  std::int64_t inputs() const { return sums_.size(); }
  std::uint64_t rows() const { return rows_; }
  // The sums so far; the upper triangle counts.
  const SquareMatrix& sums() const { return sums_; }

 private:
  SquareMatrix sums_;
  std::uint64_t rows_ = 0;
  std::vector<float> left_, right_;  // panels of the rows at hand
};

}  // namespace bittern
