#include "formats/ggml_type.h"

#include <algorithm>
#include <string>

namespace bittern {
namespace {

constexpr GgmlTypeInfo kTypes[] = {
    {GgmlType::f32, "F32", 1, 4, true},
    {GgmlType::f16, "F16", 1, 2, true},
    {GgmlType::q4_0, "Q4_0", 32, 18, true},
    {GgmlType::q4_1, "Q4_1", 32, 20, true},
    {GgmlType::q5_0, "Q5_0", 32, 22, true},
    {GgmlType::q5_1, "Q5_1", 32, 24, true},
    {GgmlType::q8_0, "Q8_0", 32, 34, true},
    {GgmlType::q8_1, "Q8_1", 32, 36, false},  // two halves; the gguf package still says two floats
    {GgmlType::q2_k, "Q2_K", 256, 84, true},
    {GgmlType::q3_k, "Q3_K", 256, 110, true},
    {GgmlType::q4_k, "Q4_K", 256, 144, true},
    {GgmlType::q5_k, "Q5_K", 256, 176, true},
    {GgmlType::q6_k, "Q6_K", 256, 210, true},
    {GgmlType::q8_k, "Q8_K", 256, 292, false},
    {GgmlType::iq2_xxs, "IQ2_XXS", 256, 66, false},
    {GgmlType::iq2_xs, "IQ2_XS", 256, 74, false},
    {GgmlType::iq3_xxs, "IQ3_XXS", 256, 98, false},
    {GgmlType::iq1_s, "IQ1_S", 256, 50, false},
    {GgmlType::iq4_nl, "IQ4_NL", 32, 18, true},
    {GgmlType::iq3_s, "IQ3_S", 256, 110, false},
    {GgmlType::iq2_s, "IQ2_S", 256, 82, false},
    {GgmlType::iq4_xs, "IQ4_XS", 256, 136, true},
    {GgmlType::i8, "I8", 1, 1, false},
    {GgmlType::i16, "I16", 1, 2, false},
    {GgmlType::i32, "I32", 1, 4, false},
    {GgmlType::i64, "I64", 1, 8, false},
    {GgmlType::f64, "F64", 1, 8, false},
    {GgmlType::iq1_m, "IQ1_M", 256, 56, false},
    {GgmlType::bf16, "BF16", 1, 2, true},
    {GgmlType::tq1_0, "TQ1_0", 256, 54, false},
    {GgmlType::tq2_0, "TQ2_0", 256, 66, false},
    {GgmlType::mxfp4, "MXFP4", 32, 17, true},
    {GgmlType::nvfp4, "NVFP4", 64, 36, false},
    {GgmlType::q1_0, "Q1_0", 128, 18, false},
};

}  // namespace

const GgmlTypeInfo* ggml_type(std::uint32_t id) {
  for (const GgmlTypeInfo& t : kTypes) {
    if (static_cast<std::uint32_t>(t.type) == id) return &t;
  }
  return nullptr;
}

const GgmlTypeInfo* ggml_type(std::string_view any_case) {
  const auto upper = [](char c) { return c >= 'a' && c <= 'z' ? static_cast<char>(c - 32) : c; };
  for (const GgmlTypeInfo& t : kTypes) {
    const std::string_view name = t.name;
    if (std::equal(name.begin(), name.end(), any_case.begin(), any_case.end(),
                   [&](char a, char b) { return a == upper(b); }))
      return &t;
  }
  return nullptr;
}

Result<std::uint64_t> ggml_bytes(GgmlType type, const Shape& shape) {
  if (shape.rank > kGgufMostRank) {
    return invalid("rank " + std::to_string(shape.rank) + ", expected at most " +
                   std::to_string(kGgufMostRank));
  }
  const GgmlTypeInfo* known = ggml_type(static_cast<std::uint32_t>(type));
  if (known == nullptr) {
    return invalid("type " + std::to_string(static_cast<std::uint32_t>(type)) +
                   ", expected one that ggml has");
  }
  const GgmlTypeInfo& t = *known;
  const std::int64_t row = shape.rank > 0 ? shape[shape.rank - 1] : 1;
  if (row % t.block != 0) {
    return invalid("row of " + std::to_string(row) + " elements of " + t.name +
                   ", expected a multiple of " + std::to_string(t.block));
  }
  // A zero must not hide a product of the others that overflows: code multiplies some of them.
  bool empty = false, fits = true;
  std::int64_t elements = 1, bytes = t.block_bytes;
  for (int i = 0; i < shape.rank; ++i) {
    if (shape[i] < 0)
      return invalid("dimension " + std::to_string(shape[i]) + ", expected at least 0");
    empty |= shape[i] == 0;
    const bool is_row = i == shape.rank - 1;
    const std::int64_t n = std::max<std::int64_t>(shape[i], 1);
    const std::int64_t blocks = is_row ? std::max<std::int64_t>(n / t.block, 1) : n;
    fits &= !__builtin_mul_overflow(elements, n, &elements);
    fits &= !__builtin_mul_overflow(bytes, blocks, &bytes);
  }
  if (!fits) return invalid("shape " + shape.str() + ", expected fewer than 2^63 bytes");
  return empty ? 0 : static_cast<std::uint64_t>(bytes);
}

}  // namespace bittern
