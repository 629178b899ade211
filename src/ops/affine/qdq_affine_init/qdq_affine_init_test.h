// What the tests of qdq_affine_init share: weights in, codes, scales and biases out.
#pragma once
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string_view>
#include <vector>

#include "bittern/ops/qdq_affine_init.h"
#include "oracle/op_test.h"
#include "oracle/oracle.h"

namespace bittern::qdq_affine_init_test {

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// S: the dtype of scales and biases.
template <class X, class S = X>
struct Output {
  Status status;
  std::vector<S> scales, biases;
  std::vector<std::uint8_t> q;
  std::vector<std::uint32_t> words;
  double s(std::size_t g = 0) const { return static_cast<double>(to_math(scales[g])); }
  double b(std::size_t g = 0) const { return static_cast<double>(to_math(biases[g])); }
};

template <class X, class S = X>
Output<X, S> init(AffineDesc d, const std::vector<X>& w, const std::vector<float>& importance = {},
                  std::string_view kernel = {}) {
  d.element = dtype_of<X>();
  d.f32_scale = !std::is_same_v<X, S>;
  if (d.axis_size == 0) d.axis_size = d.group_size;
  d.outer_size = static_cast<std::int64_t>(w.size()) / d.axis_size;
  Output<X, S> r;
  r.scales.resize(static_cast<std::size_t>(d.param_shape().numel()));
  r.biases.resize(r.scales.size());
  QdqAffineInit::Args a;
  a.w = view(w.data(), d.tensor_shape());
  if (!importance.empty()) a.importance = view(importance.data(), {d.axis_size});
  a.scales = view(r.scales.data(), d.param_shape());
  a.biases = view(r.biases.data(), d.param_shape());
  const auto codes = static_cast<std::size_t>(d.code_shape().numel());
  if (d.storage == CodeStorage::u8) {
    r.q.resize(codes);
    a.q = view(r.q.data(), d.code_shape());
  } else {
    r.words.resize(codes);
    a.q = view(r.words.data(), d.code_shape());
  }
  r.status = oracle::run_op<QdqAffineInit>(d, a, kernel);
  EXPECT_TRUE(r.status.ok() || d.expect_finite) << r.status.message();
  return r;
}

inline AffineDesc group_of(std::size_t n, std::int32_t bits,
                           AffineMethod method = AffineMethod::minmax) {
  return {.group_size = static_cast<std::int64_t>(n), .bits = bits, .method = method};
}

using Codes = std::vector<std::uint8_t>;

template <class X>
std::vector<X> gaussian(std::int64_t n, std::uint64_t seed, bool heavy_tailed = false) {
  oracle::Rng rng(seed);
  std::vector<X> w;
  for (std::int64_t i = 0; i < n; ++i) {
    const double radius = std::sqrt(-2 * std::log(1 - rng.uniform()));
    const double x = radius * std::cos(6.283185307179586 * rng.uniform()) /
                     (heavy_tailed ? 0.02 + rng.uniform() : 1.0);
    w.push_back(from_math<X>(static_cast<Math<X>>(x)));
  }
  return w;
}

}  // namespace bittern::qdq_affine_init_test
