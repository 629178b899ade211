// Factors of symmetric matrices in f64. Every element is computed by one list of operations, so the
// bits depend neither on the number of threads nor on the SIMD target (docs/adr/0015).
#pragma once
#include <cstdint>
#include <vector>

#include "bittern/status.h"

namespace bittern {

// A square matrix of f64, rows one behind the other. Rows have room for whole vectors; what is
// behind column `size` of a row is 0 or undefined.
class SquareMatrix {
 public:
  SquareMatrix() = default;
  explicit SquareMatrix(std::int64_t size)
      : size_(size), stride_(padded(size)), numbers_(static_cast<std::size_t>(size_ * stride_)) {}

  std::int64_t size() const { return size_; }
  std::int64_t stride() const { return stride_; }
  double* row(std::int64_t i) { return numbers_.data() + i * stride_; }
  const double* row(std::int64_t i) const { return numbers_.data() + i * stride_; }

 private:
  // Whole vectors; and rows that are a power of two apart would share a few lines of the cache.
  static std::int64_t padded(std::int64_t size) {
    const std::int64_t whole = (size + 7) / 8 * 8;
    return whole % 128 == 0 ? whole + 8 : whole;
  }
  std::int64_t size_ = 0, stride_ = 0;
  std::vector<double> numbers_;
};

// a = V^T V with V upper triangular, which replaces a. Only a's upper triangle is read; what is
// below the diagonal then is undefined.
//   V[i][j] = (a[i][j] - sum over k < i of V[k][i] V[k][j]) / V[i][i]
// with each term subtracted by fma, k ascending. An error if a is not positive definite.
Status factor(SquareMatrix& a);

// X = V^-1 replaces the upper triangular V. What is below the diagonal is not read, and then
// undefined.
//   X[i][j] = (i == j - sum over k > i of V[i][k] X[k][j]) / V[i][i]
// with each term subtracted by fma: first those of k outside of i's block of 64, ascending, then
// those inside.
void invert_upper(SquareMatrix& v);

}  // namespace bittern
