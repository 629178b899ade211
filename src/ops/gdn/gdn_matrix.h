// Matrices of f64, for what judges the kernels of the chunk form.
#pragma once
#include <cstdint>
#include <vector>

namespace bittern::oracle {

struct Matrix {
  Matrix(std::int64_t r, std::int64_t c)
      : rows(r), columns(c), data(static_cast<std::size_t>(r * c)) {}
  double& operator()(std::int64_t i, std::int64_t j) {
    return data[static_cast<std::size_t>(i * columns + j)];
  }
  double operator()(std::int64_t i, std::int64_t j) const {
    return data[static_cast<std::size_t>(i * columns + j)];
  }
  std::int64_t rows, columns;
  std::vector<double> data;
};

template <class F>
Matrix made(std::int64_t rows, std::int64_t columns, F&& f) {
  Matrix m(rows, columns);
  for (std::int64_t i = 0; i < rows; ++i)
    for (std::int64_t j = 0; j < columns; ++j) m(i, j) = f(i, j);
  return m;
}
// Of finite numbers.
inline Matrix operator*(const Matrix& a, const Matrix& b) {
  Matrix c(a.rows, b.columns);
  for (std::int64_t i = 0; i < a.rows; ++i) {
    double* const to = c.data.data() + i * c.columns;
    for (std::int64_t k = 0; k < a.columns; ++k) {
      const double x = a(i, k);
      if (x == 0) continue;  // many are triangles, or unit matrices
      const double* const from = b.data.data() + k * b.columns;
      for (std::int64_t j = 0; j < b.columns; ++j) to[j] += x * from[j];
    }
  }
  return c;
}
inline Matrix operator-(Matrix a, const Matrix& b) {
  for (std::size_t i = 0; i < a.data.size(); ++i) a.data[i] -= b.data[i];
  return a;
}
inline Matrix operator+(Matrix a, const Matrix& b) {
  for (std::size_t i = 0; i < a.data.size(); ++i) a.data[i] += b.data[i];
  return a;
}
inline Matrix transposed(const Matrix& a) {
  return made(a.columns, a.rows, [&](auto i, auto j) { return a(j, i); });
}

}  // namespace bittern::oracle
