#include "ops/aura/aura.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

namespace bittern {
namespace {

bool is_prime(std::int64_t q) {
  for (std::int64_t p = 2; p * p <= q; ++p)
    if (q % p == 0) return false;
  return q > 1;
}

// chi(a mod q): 1 for a square, -1 for a non-square, 0 for 0.
float legendre(std::int64_t a, std::int64_t q) {
  a = (a % q + q) % q;
  if (a == 0) return 0;
  for (std::int64_t x = 1; x < q; ++x)
    if (x * x % q == a) return 1;
  return -1;
}

// [[0, 1], [left, S]], S[i,j] = chi(j - i)
std::vector<float> conference_matrix(std::int64_t q, float left) {
  const std::int64_t order = q + 1;
  std::vector<float> c(static_cast<std::size_t>(order * order));
  for (std::int64_t i = 0; i < order; ++i) {
    for (std::int64_t j = 0; j < order; ++j) {
      const float border = i == j ? 0.0f : i == 0 ? 1.0f : left;
      c[static_cast<std::size_t>(i * order + j)] = i == 0 || j == 0 ? border : legendre(j - i, q);
    }
  }
  return c;
}

std::vector<float> paley_matrix(std::int64_t m) {
  if (m == 1) return {1.0f};
  std::vector<float> h(static_cast<std::size_t>(m * m));
  const bool first_kind = is_prime(m - 1);
  const std::int64_t order = first_kind ? m : m / 2;
  const std::vector<float> c = conference_matrix(order - 1, first_kind ? -1.0f : 1.0f);
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < m; ++j) {
      const std::int64_t a = i % order, b = j % order;
      const bool lower = i >= order, right = j >= order;
      const float identity = a == b ? 1.0f : 0.0f;
      h[static_cast<std::size_t>(i * m + j)] =
          (lower && right ? -1.0f : 1.0f) * c[static_cast<std::size_t>(a * order + b)] +
          (lower || right ? -1.0f : 1.0f) * identity;
    }
  }
  return h;
}

// t := M t, where M is `matrix` [m, m] or its transpose.
void multiply(const float* matrix, std::int64_t m, bool transpose, float* t) {
  std::vector<float> product(static_cast<std::size_t>(m));
  for (std::int64_t a = 0; a < m; ++a) {
    float acc = 0;
    for (std::int64_t c = 0; c < m; ++c)
      acc = std::fma(matrix[transpose ? c * m + a : a * m + c], t[c], acc);
    product[static_cast<std::size_t>(a)] = acc;
  }
  std::copy(product.begin(), product.end(), t);
}

// t := H t on [m, n], H or its transpose: step 3 of a hadamard rotation.
void mix(const float* matrix, std::int64_t m, std::int64_t n, bool transpose, float* t) {
  std::vector<float> column(static_cast<std::size_t>(m));
  const auto join = [](float a, bool plus, float b) { return plus ? a + b : a - b; };
  for (std::int64_t b = 0; b < n; ++b) {
    for (std::int64_t a = 0; a < m; ++a) {
      float acc = 0;
      for (std::int64_t c = 0; c < m; c += 4) {
        const auto h = [&](std::int64_t i) {
          return matrix[transpose ? (c + i) * m + a : a * m + c + i];
        };
        const auto at = [&](std::int64_t i) { return t[(c + i) * n + b]; };
        const float four =
            join(join(at(0), h(0) == h(1), at(1)), h(0) == h(2), join(at(2), h(2) == h(3), at(3)));
        acc = c == 0 ? h(0) * four : join(acc, h(0) > 0, four);
      }
      column[static_cast<std::size_t>(a)] = acc;
    }
    for (std::int64_t a = 0; a < m; ++a) t[a * n + b] = column[static_cast<std::size_t>(a)];
  }
}

void butterflies(std::int64_t dim, std::int64_t n, float* t) {
  for (std::int64_t h = 1; h < n; h *= 2) {
    for (std::int64_t j = 0; j < dim; ++j) {
      if ((j % n & h) != 0) continue;
      const float a = t[j], b = t[j + h];
      t[j] = a + b;
      t[j + h] = a - b;
    }
  }
}

}  // namespace

const float* hadamard_matrix(std::int64_t m) {
  static const auto matrices = [] {
    std::array<std::vector<float>, std::size(kHadamardFactors)> all;
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = paley_matrix(kHadamardFactors[i]);
    return all;
  }();
  for (std::size_t i = 0; i < matrices.size(); ++i)
    if (kHadamardFactors[i] == m) return matrices[i].data();
  return nullptr;
}

float hadamard_scale(std::int64_t dim) {
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(dim)));
}

void rotate_row(Rotation rotation, std::int64_t dim, const float* table, bool inverse, float* row,
                float factor) {
  if (rotation != Rotation::hadamard) {
    for (std::int64_t j = 0; j < dim; ++j) row[j] *= factor;
    if (rotation == Rotation::dense) multiply(table, dim, inverse, row);
    return;
  }
  const std::int64_t m = hadamard_factor(dim), n = dim / m;
  const float scale = factor * hadamard_scale(dim);
  for (std::int64_t j = 0; j < dim; ++j) row[j] *= inverse ? scale : table[j] * scale;
  if (!inverse) butterflies(dim, n, row);
  if (m > 1) mix(hadamard_matrix(m), m, n, inverse, row);
  if (!inverse) return;
  butterflies(dim, n, row);
  for (std::int64_t j = 0; j < dim; ++j) row[j] *= table[j];
}

}  // namespace bittern
