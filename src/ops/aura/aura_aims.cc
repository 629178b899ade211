#include "ops/aura/aura_aims.h"

#include <map>

#include "bittern/codec.h"
#include "ops/aura/aura.h"

namespace bittern::oracle {

std::vector<AuraDesc> aura_cases() {
  std::vector<AuraDesc> cases;
  std::size_t turn = 0;
  static constexpr DType kElements[] = {DType::f32, DType::f16, DType::bf16};
  const auto add = [&](std::int64_t rows, std::int64_t dim, Rotation rotation) {
    AuraDesc d{.rows = rows, .dim = dim, .rotation = rotation};
    d.bits = static_cast<std::int32_t>(turn % 8) + 1;
    d.element = kElements[turn % 3];
    d.scale_rule = static_cast<ScaleRule>(turn / 2 % 4);
    d.f16_scale = turn % 5 == 0;
    ++turn;
    cases.push_back(d);
  };
  for (const std::int64_t dim :
       {2,  3,  4,  7,  8,   12,  15,  16,  17,  20,  24,  31,  32,  33,  44,   60,
        64, 72, 80, 96, 100, 112, 127, 128, 129, 192, 240, 256, 512, 640, 1000, 1024}) {
    for (const Rotation rotation : {Rotation::identity, Rotation::hadamard, Rotation::dense}) {
      if (rotation == Rotation::hadamard && hadamard_factor(dim) == 0) continue;
      if (rotation == Rotation::dense && dim > 260) continue;  // one below: `ref` is slow
      add(dim > 300 ? 3 : dim > 100 ? 5 : 19, dim, rotation);
    }
  }
  add(2, 515, Rotation::dense);
  // The tuned lengths at every width.
  for (const std::int64_t dim : {64, 80, 128}) {
    for (int bits = 1; bits <= 8; ++bits) {
      add(17, dim, Rotation::hadamard);
      cases.back().bits = bits;
    }
  }
  add(0, 64, Rotation::hadamard);
  add(33, 128, Rotation::hadamard);
  return cases;
}

namespace {

const Codebook& book(std::int64_t dim, std::int32_t bits) {
  thread_local std::map<std::pair<std::int64_t, std::int32_t>, Codebook> made;
  auto at = made.find({dim, bits});
  if (at == made.end()) at = made.emplace(std::pair(dim, bits), *sphere_codebook(dim, bits)).first;
  return at->second;
}

const std::vector<float>& rotation_table(const AuraDesc& d) {
  thread_local std::map<std::pair<std::int64_t, Rotation>, std::vector<float>> made;
  const std::pair key(d.dim, d.rotation);
  auto at = made.find(key);
  if (at == made.end()) {
    at = made.emplace(key, *make_rotation(d.rotation, d.dim, 5)).first;
  }
  return at->second;
}

void copy(const std::vector<float>& from, const ConstView& to) {
  std::copy(from.begin(), from.end(), data<float>(to));
}

}  // namespace

void fill_aura(const AuraDesc& d, std::string_view operand, const ConstView& view, Rng& rng) {
  if (operand == "table") copy(rotation_table(d), view);
  if (operand == "boundaries") copy(book(d.dim, d.bits).boundaries, view);
  if (operand == "codebook") copy(book(d.dim, d.bits).levels, view);
  if (operand == "scales") {
    for (std::int64_t i = 0; i < d.rows; ++i) put(view, i, 0.5 + rng.uniform());
  }
}

void aim_rows(const ConstView& x, Rng& rng) {
  const std::int64_t n = x.shape[x.shape.rank - 1], rows = x.shape.numel() / n;
  const auto set = [&](std::int64_t i, std::int64_t j, double value) { put(x, i * n + j, value); };
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::int64_t kind = rng.below(16);
    // Ordinary rows: fill() has already put a NaN, an infinity or a huge value into most long ones.
    const double size = std::ldexp(1.0, static_cast<int>(rng.below(17)) - 8);
    if (kind == 0) continue;  // as fill() left it
    for (std::int64_t j = 0; j < n; ++j) set(i, j, size * rng.normal());
    const std::int64_t at = rng.below(n);
    switch (kind) {
      case 1:
        for (std::int64_t j = 0; j < n; ++j) set(i, j, rng.chance(2) ? 0.0 : -0.0);
        break;
      case 2:
        for (std::int64_t j = 0; j < n; ++j) set(i, j, -0.0);
        break;
      case 3:
        for (std::int64_t j = 0; j < n; ++j) set(i, j, size);
        break;
      case 4:
        for (std::int64_t j = 0; j < n; ++j) set(i, j, j == at ? size : 0.0);
        break;
      case 5: {  // any size; or sums of squares around the least and the largest ordinary one
        int exponent = static_cast<int>(rng.below(278)) - 150;
        if (rng.chance(2)) {
          exponent = rng.chance(2) ? -52 : 61;
          exponent -= static_cast<int>(rng.below(4));
        }
        for (std::int64_t j = 0; j < n; ++j) set(i, j, std::ldexp(rng.normal(), exponent));
        break;
      }
      case 6:  // squares overflow, the norm need not
        for (std::int64_t j = 0; j < n; ++j) set(i, j, 1e37 * rng.normal());
        break;
      case 7:
        for (std::int64_t j = 0; j < n; ++j) set(i, j, rng.chance(2) ? 3.4e38 : -3.4e38);
        break;
      case 8: set(i, at, std::numeric_limits<double>::quiet_NaN()); break;
      case 9: set(i, at, -std::numeric_limits<double>::infinity()); break;
      case 10:
        for (int k = 0; k < 4; ++k) {
          const std::int64_t j = rng.below(n);
          set(i, j, 30 * size * rng.normal());
        }
        break;
      default: break;
    }
  }
}

void aim_at_boundaries(const AuraDesc& d, const float* table, const float* boundaries,
                       const ConstView& at, std::int64_t row, Rng& rng) {
  std::vector<float> x(static_cast<std::size_t>(d.dim));
  double rest = 1;
  for (float& v : x) {
    const float boundary = boundaries[rng.below(d.levels() - 1)];
    v = static_cast<float>(step(DType::f32, boundary, static_cast<int>(rng.below(5)) - 2));
    if (&v == &x.back() || rest <= static_cast<double>(v) * static_cast<double>(v)) {
      v = static_cast<float>(std::sqrt(rest));
    }
    rest -= static_cast<double>(v) * static_cast<double>(v);
    if (!(rest > 0)) rest = 0;
  }
  rotate_row(d.rotation, d.dim, table, true, x.data());
  const double scale = std::ldexp(1.0, static_cast<int>(rng.below(9)) - 4);
  for (std::int64_t j = 0; j < d.dim; ++j)
    put(at, row * d.dim + j, scale * static_cast<double>(x[static_cast<std::size_t>(j)]));
}

}  // namespace bittern::oracle
