// The blocked factors against plain loops with the same list of operations: bit for bit, on every
// SIMD target and any number of threads. tests/python/test_gptq.py has LAPACK as a judge.
#include "distill/linear_algebra.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "bittern/device.h"
#include "core/thread_count.h"
#include "cpu/dispatch.h"

namespace bittern {
namespace {

SquareMatrix positive(std::int64_t n) {
  std::mt19937 random(static_cast<unsigned>(n) + 1);
  std::normal_distribution<double> normal;
  std::vector<double> x(static_cast<std::size_t>(n * (n + 3)));
  for (double& value : x) value = normal(random);
  SquareMatrix a(n);
  for (std::int64_t i = 0; i < n; ++i)
    for (std::int64_t j = i; j < n; ++j)
      for (std::int64_t t = 0; t < n + 3; ++t)
        a.row(i)[j] +=
            x[static_cast<std::size_t>(t * n + i)] * x[static_cast<std::size_t>(t * n + j)];
  return a;
}

SquareMatrix plain_factor(const SquareMatrix& a) {
  SquareMatrix v = a;
  for (std::int64_t i = 0; i < a.size(); ++i)
    for (std::int64_t j = i; j < a.size(); ++j) {
      double& x = v.row(i)[j];
      for (std::int64_t k = 0; k < i; ++k) x = std::fma(-v.row(k)[i], v.row(k)[j], x);
      x = i == j ? std::sqrt(x) : x / v.row(i)[i];
    }
  return v;
}

SquareMatrix plain_inverse(const SquareMatrix& v) {
  const std::int64_t n = v.size();
  SquareMatrix x(n);
  for (std::int64_t i = n - 1; i >= 0; --i) {
    const std::int64_t block = std::min(n, i / 64 * 64 + 64);
    for (std::int64_t j = i; j < n; ++j) {
      double sum = i == j;
      for (std::int64_t k = block; k <= j; ++k) sum = std::fma(-v.row(i)[k], x.row(k)[j], sum);
      for (std::int64_t k = i + 1; k < std::min(block, j + 1); ++k)
        sum = std::fma(-v.row(i)[k], x.row(k)[j], sum);
      x.row(i)[j] = sum / v.row(i)[i];
    }
  }
  return x;
}

void expect_same(const SquareMatrix& a, const SquareMatrix& b) {
  for (std::int64_t i = 0; i < a.size(); ++i)
    for (std::int64_t j = i; j < a.size(); ++j)
      ASSERT_EQ(a.row(i)[j], b.row(i)[j]) << i << " " << j << " of " << a.size();
}

TEST(LinearAlgebra, FactorsAndInversesAreThePlainLoopsBits) {
  for (const std::int64_t n : {0, 1, 2, 7, 63, 64, 65, 128, 190, 321}) {
    const SquareMatrix a = positive(n), v = plain_factor(a), x = plain_inverse(v);
    for (const cpu::Isa isa : cpu::available_isas())
      for (const int threads : {1, 2, 3}) {
        cpu::force_isa(isa);
        const ThreadCount count(threads);
        SquareMatrix made = a;
        ASSERT_TRUE(factor(made).ok());
        expect_same(made, v);
        invert_upper(made);
        expect_same(made, x);
      }
  }
  cpu::force_isa(cpu::Isa::none);
}

TEST(LinearAlgebra, TheInverseIsOne) {
  SquareMatrix a = positive(150);
  ASSERT_TRUE(factor(a).ok());
  SquareMatrix x = a;
  invert_upper(x);
  for (std::int64_t i = 0; i < 150; ++i)
    for (std::int64_t j = i; j < 150; ++j) {
      double sum = 0;
      for (std::int64_t k = i; k <= j; ++k) sum += a.row(i)[k] * x.row(k)[j];
      EXPECT_NEAR(sum, i == j, 1e-9) << i << " " << j;
    }
}

TEST(LinearAlgebra, RefusesWhatIsNotPositiveDefinite) {
  for (const double bad : {0.0, -1.0, std::numeric_limits<double>::quiet_NaN(),
                           std::numeric_limits<double>::infinity()})
    for (const std::int64_t at : {0, 69}) {
      SquareMatrix a = positive(70);
      a.row(at)[at] = bad;
      const Status status = factor(a);
      EXPECT_EQ(status.code(), Code::invalid_argument) << bad << " at " << at;
      EXPECT_NE(std::string(status.message()).find("not positive definite"), std::string::npos);
    }
}

}  // namespace
}  // namespace bittern
