#include "distill/linear_algebra.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "cpu/parallel.h"
#include "distill/f64_products.h"

namespace bittern {
namespace {

// Rows that are worked on together. All others enter by one product with them, at its speed.
constexpr std::int64_t kBlock = 64;
constexpr std::int64_t kGrain = 64;  // a thread's least columns

// Rows [first, last) of x, columns from `from` on, by those above them in the block:
//   x[i] = (x[i] - sum over first <= k < i of v[k][i] x[k]) / v[i][i]
void solve_down(const SquareMatrix& v, std::int64_t first, std::int64_t last, SquareMatrix& x,
                std::int64_t from, std::int64_t to) {
  for (std::int64_t i = first; i < last; ++i) {
    double* const row = x.row(i);
    if (i > first)
      subtract_product(1, to - from, i - first, {v.row(first) + i, 0, v.stride()},
                       x.row(first) + from, x.stride(), row + from, x.stride());
    const double pivot = v.row(i)[i];
    for (std::int64_t j = from; j < to; ++j) row[j] /= pivot;
  }
}

}  // namespace

Status factor(SquareMatrix& a) {
  const std::int64_t n = a.size();
  for (std::int64_t first = 0; first < n; first += kBlock) {
    const std::int64_t last = std::min(n, first + kBlock);
    // What the rows above take from columns [from, to) of these.
    const auto take = [&](std::int64_t from, std::int64_t to) {
      subtract_product(last - first, to - from, first, {a.row(0) + first, 1, a.stride()},
                       a.row(0) + from, a.stride(), a.row(first) + from, a.stride());
    };
    take(first, last);
    for (std::int64_t i = first; i < last; ++i) {
      double* const row = a.row(i);
      for (std::int64_t k = first; k < i; ++k)
        for (std::int64_t j = i; j < last; ++j)
          row[j] = std::fma(-a.row(k)[i], a.row(k)[j], row[j]);
      if (!(row[i] > 0) || !std::isfinite(row[i]))
        return invalid("the matrix is not positive definite: pivot " + std::to_string(row[i]) +
                       " in column " + std::to_string(i));
      row[i] = std::sqrt(row[i]);
      for (std::int64_t j = i + 1; j < last; ++j) row[j] /= row[i];
    }
    cpu::parallel(
        n - last, kGrain,
        [&](std::int64_t begin, std::int64_t end) {
          take(last + begin, last + end);
          solve_down(a, first, last, a, last + begin, last + end);
        },
        kGrain);
  }
  return {};
}

void invert_upper(SquareMatrix& v) {
  const std::int64_t n = v.size();
  if (n == 0) return;
  std::vector<double> above;  // the block's rows of V, which X replaces
  for (std::int64_t first = (n - 1) / kBlock * kBlock; first >= 0; first -= kBlock) {
    const std::int64_t last = std::min(n, first + kBlock), rows = last - first;
    const std::int64_t stride = v.stride();
    above.assign(v.row(first), v.row(first) + rows * stride);
    const auto old = [&](std::int64_t i, std::int64_t j) {
      return above[static_cast<std::size_t>((i - first) * stride + j)];
    };
    // X[i] = (e_i - sum over k > i of V[i][k] X[k]) / V[i][i], from the last row up.
    const auto solve_up = [&](std::int64_t from, std::int64_t to) {
      for (std::int64_t i = last - 1; i >= first; --i) {
        double* const row = v.row(i);
        if (i + 1 < last)
          subtract_product(1, to - from, last - 1 - i,
                           {above.data() + (i - first) * stride + i + 1, 0, 1}, v.row(i + 1) + from,
                           stride, row + from, stride);
        const double pivot = old(i, i);
        for (std::int64_t j = from; j < to; ++j) row[j] /= pivot;
      }
    };
    cpu::parallel(
        n - last, kGrain,
        [&](std::int64_t begin, std::int64_t end) {
          // Column block by column block: X has nothing below its diagonal.
          for (std::int64_t from = last + begin; from < last + end; from += kGrain) {
            const std::int64_t to = std::min(last + end, from + kGrain);
            for (std::int64_t i = first; i < last; ++i)
              std::fill(v.row(i) + from, v.row(i) + to, 0.0);
            subtract_product(rows, to - from, to - last, {above.data() + last, stride, 1},
                             v.row(last) + from, stride, v.row(first) + from, stride);
          }
          solve_up(last + begin, last + end);
        },
        kGrain);
    for (std::int64_t i = last - 1; i >= first; --i) {
      double* const row = v.row(i);
      std::fill(row + first, row + last, 0.0);
      for (std::int64_t k = i + 1; k < last; ++k)
        for (std::int64_t j = k; j < last; ++j) row[j] = std::fma(-old(i, k), v.row(k)[j], row[j]);
      row[i] = 1;
      for (std::int64_t j = i; j < last; ++j) row[j] /= old(i, i);
    }
  }
}

}  // namespace bittern
