// The element types of safetensors.
#pragma once
#include <cstdint>
#include <optional>
#include <string_view>

#include "bittern/dtype.h"

namespace bittern {

// In the format's own order, by alignment: a file holds the last ones first.
enum class SafeDType : std::uint8_t {
  boolean,
  f4,
  f6_e2m3,
  f6_e3m2,
  u8,
  i8,
  f8_e5m2,
  f8_e4m3,
  f8_e8m0,
  f8_e4m3fnuz,
  f8_e5m2fnuz,
  i16,
  u16,
  f16,
  bf16,
  i32,
  u32,
  f32,
  c64,
  f64,
  i64,
  u64,
};
inline constexpr int kSafeDTypeCount = 22;

const char* name(SafeDType dtype);  // as the file spells it: "F8_E4M3"
int bits_of(SafeDType dtype);       // of an element: 4 and 6 are packed without gaps
std::optional<SafeDType> find_safe_dtype(std::string_view name);
// Of the three floats weights are computed with.
inline bool is_float(SafeDType dtype) {
  return dtype == SafeDType::f32 || dtype == SafeDType::f16 || dtype == SafeDType::bf16;
}
// The library's own type of the same values, and back.
std::optional<DType> to_dtype(SafeDType dtype);
SafeDType to_safe_dtype(DType dtype);

}  // namespace bittern
