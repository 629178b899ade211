// What the tests of aura_encode share: rows encoded and decoded, and how far they are apart.
#pragma once
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "bittern/codec.h"
#include "ops/aura/aura.h"
#include "oracle/op_test.h"
#include "oracle/oracle_test.h"

namespace bittern::aura_encode_test {

using oracle::expect_error;
using oracle::expect_ok;
using oracle::kBothKernels;
using oracle::run_op;

inline std::string text_of(float v) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", static_cast<double>(v));
  return text;
}

struct Encoded {
  std::vector<std::uint32_t> packed;
  std::vector<float> scales;  // widened, if f16
  std::uint32_t code(const AuraDesc& d, std::int64_t row, std::int64_t j) const {
    return packed_code(packed.data() + row * d.packed_shape()[1], j, d.bits);
  }
};

struct Tables {
  Codebook book;
  std::vector<float> rotation;
  Tables(const AuraDesc& d, std::uint64_t seed = 1)
      : book(*sphere_codebook(d.dim, d.bits)), rotation(*make_rotation(d.rotation, d.dim, seed)) {}
};

// Rows over outputs that are dirty.
template <class X = float>
Encoded encode(AuraDesc& d, const std::vector<X>& x, const Tables& t,
               std::string_view kernel = {}) {
  d.rows = static_cast<std::int64_t>(x.size()) / d.dim;
  const auto rows = static_cast<std::size_t>(d.rows);
  Encoded out{std::vector<std::uint32_t>(static_cast<std::size_t>(d.packed_shape().numel()), ~0u),
              std::vector<float>(rows, -7)};
  std::vector<f16> half(rows);
  AuraEncode::Args args{.x = view(x.data(), d.tensor_shape()),
                        .boundaries = view(t.book.boundaries.data(), {d.levels() - 1}),
                        .codebook = view(t.book.levels.data(), {d.levels()}),
                        .packed = view(out.packed.data(), d.packed_shape()),
                        .scales = view(out.scales.data(), d.scale_shape())};
  if (d.f16_scale) args.scales = view(half.data(), d.scale_shape());
  if (d.rotation != Rotation::identity) args.table = view(t.rotation.data(), d.rotation_shape());
  expect_ok(run_op<AuraEncode>(d, args, kernel));
  for (std::size_t i = 0; d.f16_scale && i < rows; ++i) out.scales[i] = to_f32(half[i]);
  return out;
}

inline std::vector<float> decode(const AuraDesc& d, const Encoded& e, const Tables& t) {
  std::vector<float> y(static_cast<std::size_t>(d.tensor_shape().numel()));
  AuraDesc plain = d;
  plain.f16_scale = false;
  AuraDecode::Args args{.packed = view(e.packed.data(), d.packed_shape()),
                        .scales = view(e.scales.data(), d.scale_shape()),
                        .codebook = view(t.book.levels.data(), {d.levels()}),
                        .y = view(y.data(), d.tensor_shape())};
  if (d.rotation != Rotation::identity) args.table = view(t.rotation.data(), d.rotation_shape());
  expect_ok(run_op<AuraDecode>(plain, args));
  return y;
}

// Independent Gaussians, so rows point anywhere: drawn from 64 Ki samples.
class Gaussians {
 public:
  explicit Gaussians(std::uint64_t seed) : rng_(seed), samples_(1 << 16) {
    for (std::size_t i = 0; i < samples_.size(); i += 2) {
      const double radius = std::sqrt(-2 * std::log(1 - rng_.uniform()));
      const double angle = 2 * M_PI * rng_.uniform();
      samples_[i] = static_cast<float>(radius * std::cos(angle));
      samples_[i + 1] = static_cast<float>(radius * std::sin(angle));
    }
  }
  std::vector<float> rows(std::int64_t count, std::int64_t dim) {
    std::vector<float> x(static_cast<std::size_t>(count * dim));
    std::uint64_t bits = 0;
    for (std::size_t i = 0; i < x.size(); ++i, bits >>= 16) {
      if (i % 4 == 0) bits = rng_.next();
      x[i] = samples_[bits & 0xffff];
    }
    return x;
  }

 private:
  oracle::Rng rng_;
  std::vector<float> samples_;
};

// The mean over rows of |x - x'|^2 / |x|^2.
inline double relative_error(const AuraDesc& d, const std::vector<float>& x,
                             const std::vector<float>& y) {
  const auto n = static_cast<std::size_t>(d.dim);
  double total = 0;
  for (std::size_t i = 0; i < x.size(); i += n) {
    double error = 0, size = 0;
    for (std::size_t j = i; j < i + n; ++j) {
      const auto a = static_cast<double>(x[j]), e = a - static_cast<double>(y[j]);
      error += e * e;
      size += a * a;
    }
    total += error / size;
  }
  return total * static_cast<double>(n) / static_cast<double>(x.size());
}

inline double round_trip_error(AuraDesc d, const std::vector<float>& x, const Tables& t) {
  const Encoded e = encode(d, x, t);
  return relative_error(d, x, decode(d, e, t));
}

template <class X>
std::vector<X> stored(const std::vector<float>& x) {
  std::vector<X> to(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) to[i] = from_math<X>(x[i]);
  return to;
}

// ---- rows of any size ----

inline constexpr ScaleRule kAllRules[] = {ScaleRule::matched, ScaleRule::none,
                                          ScaleRule::least_squares, ScaleRule::unbiased};
inline constexpr Rotation kAllRotations[] = {Rotation::identity, Rotation::hadamard,
                                             Rotation::dense};

// Rows of 8 significant bits, which every element type holds, times each power of two that leaves
// them exact: from the type's subnormals (for f32 the powers named here) to its largest. Row 0 is
// the plain one.
inline constexpr int kLeastPower = -143, kMostPower = 126;
inline std::vector<float> rows_of_all_sizes(std::int64_t dim, int least, int most) {
  Gaussians gaussians(13);
  auto x = gaussians.rows(1, dim);
  for (float& v : x) v = std::clamp(std::round(v * 64) / 64, -3.0f, 3.0f);
  x[0] = 3;
  std::vector<float> all = x;
  for (int power = least; power <= most; ++power)
    for (const float v : x) all.push_back(std::ldexp(v, power));
  return all;
}

}  // namespace bittern::aura_encode_test
