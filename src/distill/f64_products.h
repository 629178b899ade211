// Products of f64 matrices that are part of a larger computation.
#pragma once
#include <cstdint>

namespace bittern {

// A left operand: element (i, k) is data[i * row + k * column].
struct LeftF64 {
  const double* data;
  std::int64_t row, column;
};

// c[i][j] = fma(-a[i][k], b[k][j], ...), k ascending, from c[i][j]. Rows of b and c are read and
// written in whole vectors of 8.
void subtract_product(std::int64_t rows, std::int64_t columns, std::int64_t depth, const LeftF64& a,
                      const double* b, std::int64_t b_stride, double* c, std::int64_t c_stride);

}  // namespace bittern
