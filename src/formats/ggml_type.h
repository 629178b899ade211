// The tensor types of ggml: how many elements and bytes a block of each has.
#pragma once
#include <cstdint>
#include <string_view>

#include "bittern/status.h"
#include "bittern/tensor.h"

namespace bittern {

inline constexpr int kGgufMostRank = 4;

enum class GgmlType : std::uint32_t {
  f32 = 0,
  f16 = 1,
  q4_0 = 2,
  q4_1 = 3,
  q5_0 = 6,
  q5_1 = 7,
  q8_0 = 8,
  q8_1 = 9,
  q2_k = 10,
  q3_k = 11,
  q4_k = 12,
  q5_k = 13,
  q6_k = 14,
  q8_k = 15,
  iq2_xxs = 16,
  iq2_xs = 17,
  iq3_xxs = 18,
  iq1_s = 19,
  iq4_nl = 20,
  iq3_s = 21,
  iq2_s = 22,
  iq4_xs = 23,
  i8 = 24,
  i16 = 25,
  i32 = 26,
  i64 = 27,
  f64 = 28,
  iq1_m = 29,
  bf16 = 30,
  tq1_0 = 34,
  tq2_0 = 35,
  mxfp4 = 39,
  nvfp4 = 40,
  q1_0 = 41,
};

struct GgmlTypeInfo {
  GgmlType type;
  const char* name;     // "Q4_K"
  std::uint32_t block;  // elements of a block, all of one row
  std::uint32_t block_bytes;
  bool readable;  // whether bittern turns it into numbers
};

const GgmlTypeInfo* ggml_type(std::uint32_t id);           // null: ggml has no such type (any more)
const GgmlTypeInfo* ggml_type(std::string_view any_case);  // by name
inline const GgmlTypeInfo& info(GgmlType type) {
  return *ggml_type(static_cast<std::uint32_t>(type));
}

// The bytes of a tensor of this type and row-major shape, or why it cannot be.
Result<std::uint64_t> ggml_bytes(GgmlType type, const Shape& shape);

}  // namespace bittern
