// The KV codec's row format (AURA / TurboQuant family): a row x of d values becomes d codes of
// `bits` bits and one number s, and decodes to
//
//   x' = s * P^T c[code]         P orthogonal, the codebook c for coordinates of unit vectors
//
// Code j of a row occupies bits [j*bits, (j+1)*bits) of a little-endian bit stream in u32 words,
// packed_words(d, bits) words per row, unused bits zero: the layout of pack_codes.
//
// The rotation y = P x is computed in f32, with fma where stated; every other operation is rounded:
//
//   identity   y = x. No table.
//   dense      y_i = sum over j of P[i,j] x_j: acc = fma(P[i,j], x_j, acc), j ascending, from 0.
//              Table: P, f32 [d, d]. The inverse is the same with P[j,i].
//   hadamard   P = d^-1/2 (H_m x H_n) diag(sign), d = m n, n a power of two, m one of
//              kHadamardFactors ("x" is Kronecker's product; m = 1 is the SRHT).
//              Table: f32 [d], each sign +1 or -1.
//              1. t_j = x_j * (sign_j * r), r the f32 nearest to d^-1/2
//              2. on each n consecutive values, for h = 1, 2, 4, ... n/2:
//                 (t_j, t_{j+h}) := (t_j + t_{j+h}, t_j - t_{j+h}), where j has no bit h
//              3. unless m = 1: y_{an+b} = sum over c of H_m[a,c] t_{cn+b}, four terms at a time,
//                 because many a share these sums. With h_i and t_i those of c = 4k + i,
//                 G_k = (t_0 +- t_1) +- (t_2 +- t_3), where the signs are h_0 h_1, h_0 h_2 and
//                 h_2 h_3;  y = +- G_0 +- G_1 ..., k ascending, the signs h_0
//              The inverse: t_j = y_j * r, step 3 with H_m[c,a], step 2, then x_j = t_j * sign_j.
//
// H_m is Paley's matrix: the first kind if m - 1 is a prime, otherwise the second (m = 28, 36).
// With chi the Legendre symbol mod q (0 at 0) and S[i,j] = chi(j - i):
//   I,  q = m - 1:      H = I + [[0, 1], [-1, S]]
//   II, q = m/2 - 1:    C = [[0, 1], [1, S]];  H = [[C + I, C - I], [C - I, -C - I]]
#pragma once
#include <cstdint>
#include <string_view>

#include "bittern/affine_desc.h"

namespace bittern {

enum class Rotation : std::int32_t { identity, hadamard, dense };
inline constexpr std::string_view kRotationNames[] = {"identity", "hadamard", "dense"};
constexpr auto& enum_names(Rotation) { return kRotationNames; }

// The rule that gives the stored s from the row and its codes: see bittern/ops/aura_encode.h.
enum class ScaleRule : std::int32_t { matched, none, least_squares, unbiased };
inline constexpr std::string_view kScaleRuleNames[] = {"matched", "none", "least_squares",
                                                       "unbiased"};
constexpr auto& enum_names(ScaleRule) { return kScaleRuleNames; }

inline constexpr std::int64_t kAuraMinDim = 2, kAuraMaxDim = 1024;

// The orders m of H_m in a hadamard rotation.
inline constexpr std::int64_t kHadamardFactors[] = {1, 12, 20, 28, 36, 44, 60};

// m for rows of `dim` values; 0 if dim is not kHadamardFactors[i] * 2^k.
constexpr std::int64_t hadamard_factor(std::int64_t dim) {
  for (const std::int64_t m : kHadamardFactors) {
    if (dim < 1 || dim % m != 0) continue;
    const auto n = static_cast<std::uint64_t>(dim / m);
    if (std::has_single_bit(n)) return m;
  }
  return 0;
}

struct AuraDesc {
  std::int64_t rows = 0;
  std::int64_t dim = 128;      // d, 2..1024
  std::int32_t bits = 4;       // 1..8
  DType element = DType::f32;  // of x and y: f32 f16 bf16
  Rotation rotation = Rotation::hadamard;
  ScaleRule scale_rule = ScaleRule::matched;  // read by aura_encode
  bool f16_scale = false;                     // scales are f16, otherwise f32
  bool rotated = false;                       // read by aura_decode: y is not rotated back
  bool inverse = false;                       // read by aura_rotate: y = P^T x
  bool operator==(const AuraDesc&) const = default;

  std::int64_t levels() const { return std::int64_t{1} << bits; }
  DType scale_element() const { return f16_scale ? DType::f16 : DType::f32; }
  Axes tensor_shape() const { return {{"rows", rows}, {"dim", dim}}; }
  Axes packed_shape() const { return {{"rows", rows}, {"words", packed_words(dim, bits)}}; }
  // A column: it may have a row stride.
  Axes scale_shape() const { return {{"rows", rows}, {"1", 1}}; }
  // The shape of the rotation's table; identity has none.
  Axes rotation_shape() const {
    if (rotation == Rotation::dense) return {{"dim", dim}, {"dim", dim}};
    return {{"dim", dim}};
  }
  // A dense rotation is limited by its product, everything else by memory.
  double rotation_flops() const {
    const auto n = static_cast<double>(dim);
    return rotation == Rotation::dense ? 2 * static_cast<double>(rows) * n * n : 0;
  }
};

// Which fields an op reads beyond sizes, element and rotation.
struct AuraFields {
  bool codes = false;  // bits and scales
  bool scale_rule = false;
  bool rotated = false;
  bool inverse = false;
};

// Checks a row's length, bits per code and rotation, for every op on the row format. `axis` is the
// name of the field that holds dim.
Status check_aura_row(std::string_view op, std::string_view axis, std::int64_t dim,
                      std::int32_t bits, Rotation rotation) noexcept;
Status check_aura_desc(std::string_view op, const AuraDesc& d) noexcept;

// For a table or packed codes whose length fits other bits: which bits, and the length for `bits`.
// "" for other operands.
std::string width_hint(std::string_view operand, std::int64_t dim, std::int32_t bits,
                       const Shape& found) noexcept;
// Of a rotation's table that is another rotation's.
std::string rotation_hint(std::string_view operand, Rotation rotation, const Shape& found) noexcept;

// Checks of the tables' values. Messages begin with the name of the operand.
Status check_boundaries(std::string_view op, std::string_view operand, const float* values,
                        std::int64_t count) noexcept;  // finite, never descending
Status check_codebook(std::string_view op, std::string_view operand, const float* values,
                      std::int64_t count) noexcept;  // finite
Status check_signs(std::string_view op, std::string_view operand, const float* values,
                   std::int64_t count) noexcept;  // +1 or -1
// The same for the rotation's table, as `d` describes it.
inline Status check_rotation(std::string_view op, const AuraDesc& d, const ConstView& table) {
  if (d.rotation != Rotation::hadamard) return {};
  return check_signs(op, "table", table.as<float>(), d.dim);
}

template <AuraFields kFields, class D, class F>
void visit_aura_fields(D& d, F&& f) {
  f("rows", d.rows, "number of rows");
  f("dim", d.dim, "length of a row, 2..1024");
  if constexpr (kFields.codes) f("bits", d.bits, "bits per code, 1..8");
  f("element", d.element, "dtype of the rows: f32 f16 bf16");
  f("rotation", d.rotation, "rotation of a row (hadamard takes signs, dense a matrix)");
  if constexpr (kFields.scale_rule) {
    f("scale_rule", d.scale_rule, "rule for the stored norm");
  }
  if constexpr (kFields.codes) f("f16_scale", d.f16_scale, "store scales in f16 instead of f32");
  if constexpr (kFields.rotated)
    f("rotated", d.rotated, "do not rotate back: y is in the rotated space");
  if constexpr (kFields.inverse) f("inverse", d.inverse, "apply the inverse rotation");
}

// The operand `table`, if the rotation has one and it is used; otherwise it is the last operand.
template <class A, class F>
void visit_rotation(const AuraDesc& d, A& a, F&& f, bool used = true) {
  if (d.rotation == Rotation::identity || !used) return;
  f("table", a.table, Operand{DType::f32, d.rotation_shape()});
}
template <class A, class F>
void visit_unread_rotation(const AuraDesc& d, A& a, F&& f, bool used = true) {
  if (d.rotation != Rotation::identity && used) return;
  const char* with = used ? "a hadamard or dense rotation" : "rotated = false";
  f("table", a.table, Operand::read_if(false, DType::f32, {{"dim", 0}}, with));
}

// Rows of codes, scales and values may have any strides.
inline constexpr unsigned kAuraRows = Operand::kStrided | Operand::kRowAxes;

}  // namespace bittern
