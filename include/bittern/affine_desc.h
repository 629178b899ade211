// The problem that the qdq_affine ops share: a weight [outer_size, axis_size] whose rows are cut
// into groups of group_size. Each group has one scale s and one bias b, each weight has a code q
// with n_bins possible values, and y = q * s + b.
//
// Codes are stored one per byte, or packed: code j of a row occupies bits [j*bits, (j+1)*bits) of a
// little-endian bit stream in u32 words, ceil(axis_size * bits / 32) words per row, unused bits
// zero.
#pragma once
#include <bit>
#include <cstdint>
#include <string_view>

#include "bittern/plan.h"

namespace bittern {

enum class CodeStorage : std::int32_t { u8, packed };
inline constexpr std::string_view kCodeStorageNames[] = {"u8", "packed"};
constexpr auto& enum_names(CodeStorage) { return kCodeStorageNames; }

enum class AffineMethod : std::int32_t { minmax, mlx, lsq };
inline constexpr std::string_view kAffineMethodNames[] = {"minmax", "mlx", "lsq"};
constexpr auto& enum_names(AffineMethod) { return kAffineMethodNames; }

enum class AffineRounding : std::int32_t { once, mlx };
inline constexpr std::string_view kAffineRoundingNames[] = {"once", "mlx"};
constexpr auto& enum_names(AffineRounding) { return kAffineRoundingNames; }

// Words that hold `count` codes of `bits` bits.
constexpr std::int64_t packed_words(std::int64_t count, std::int64_t bits) {
  return (count * bits + 31) / 32;
}

struct AffineDesc {
  std::int64_t outer_size = 0;
  std::int64_t axis_size = 0;
  std::int64_t group_size = 64;  // 2..1024, divides axis_size
  std::int32_t bits = 0;         // per packed code, 1..8; 0: as many as n_bins needs
  std::int32_t n_bins = 0;       // 2..256 code values; 0: 2^bits (16 when bits is 0 too)
  DType element = DType::f32;    // of w, y, d_y: f32 f64 f16 bf16
  CodeStorage storage = CodeStorage::u8;
  bool f32_scale = false;  // f32 scales and biases for half weights; otherwise their dtype
  AffineMethod method = AffineMethod::minmax;      // read by qdq_affine_init
  AffineRounding rounding = AffineRounding::once;  // read by qdq_affine_forward
  bool expect_finite = false;  // qdq_affine_init refuses weights that are infinite or NaN
  bool operator==(const AffineDesc&) const = default;

  std::int64_t num_groups() const { return group_size > 0 ? axis_size / group_size : 0; }
  std::int32_t bins() const { return n_bins != 0 ? n_bins : bits != 0 ? 1 << bits : 16; }
  std::int32_t code_bits() const {
    if (bits != 0) return bits;
    return static_cast<std::int32_t>(std::bit_width(static_cast<std::uint32_t>(bins() - 1)));
  }
  DType scale_element() const { return f32_scale ? DType::f32 : element; }
  DType code_element() const { return storage == CodeStorage::u8 ? DType::u8 : DType::u32; }
  Axes tensor_shape() const { return {{"outer_size", outer_size}, {"axis_size", axis_size}}; }
  Axes param_shape() const {
    return {{"outer_size", outer_size}, {"axis_size/group_size", num_groups()}};
  }
  Axes code_shape() const {
    if (storage == CodeStorage::u8) return tensor_shape();
    return {{"outer_size", outer_size}, {"words", packed_words(axis_size, code_bits())}};
  }
};

Status check_affine_desc(std::string_view op, const AffineDesc& d) noexcept;

template <class D, class F>
void visit_affine_fields(D& d, F&& f) {
  f("outer_size", d.outer_size, "number of rows");
  f("axis_size", d.axis_size, "length of a row");
  f("group_size", d.group_size, "weights per scale and bias, 2..1024");
  f("bits", d.bits, "bits per code, 1..8 (0: as many as n_bins needs)");
  f("n_bins", d.n_bins, "number of code values, 2..256 (0: 2^bits)");
  f("element", d.element, "dtype of the weights: f32 f64 f16 bf16");
  f("storage", d.storage, "one code per byte, or codes packed into u32 words");
  f("f32_scale", d.f32_scale, "keep scales and biases in f32 where weights are f16 or bf16");
}

}  // namespace bittern
