#include "formats/storage.h"

#include <algorithm>
#include <utility>

#include "bittern/affine_desc.h"

namespace bittern {
namespace {

constexpr std::pair<GgmlType, SafeDType> kPlainTypes[] = {
    {GgmlType::f32, SafeDType::f32},   {GgmlType::f16, SafeDType::f16},
    {GgmlType::bf16, SafeDType::bf16}, {GgmlType::f64, SafeDType::f64},
    {GgmlType::i8, SafeDType::i8},     {GgmlType::i16, SafeDType::i16},
    {GgmlType::i32, SafeDType::i32},   {GgmlType::i64, SafeDType::i64}};

}  // namespace

Storage storage_of(GgmlType type) {
  for (const auto& [plain, dtype] : kPlainTypes)
    if (plain == type) return Storage::plain(dtype);
  return Storage::blocks(type);
}

std::optional<GgmlType> ggml_type_of(const Storage& storage) {
  if (storage.kind == Storage::Kind::blocks) return storage.type;
  if (storage.kind == Storage::Kind::affine) return std::nullopt;
  for (const auto& [plain, dtype] : kPlainTypes)
    if (dtype == storage.dtype) return plain;
  return std::nullopt;
}

std::string Storage::str() const {
  switch (kind) {
    case Kind::plain: return name(dtype);
    case Kind::blocks: return info(type).name;
    case Kind::affine: break;
  }
  return std::to_string(bits) + " bit, group " + std::to_string(group) + ", " + name(dtype);
}

Result<std::uint64_t> Storage::bytes(const Shape& shape) const {
  if (kind == Kind::blocks) return ggml_bytes(type, shape);
  std::uint64_t elements = 1;
  bool empty = false, fits = true;
  for (int i = 0; i < shape.rank; ++i) {
    if (shape[i] < 0)
      return invalid("dimension " + std::to_string(shape[i]) + ", expected at least 0");
    empty |= shape[i] == 0;
    const auto n = static_cast<std::uint64_t>(std::max<std::int64_t>(shape[i], 1));
    fits &= !__builtin_mul_overflow(elements, n, &elements);
  }
  const std::int64_t columns = shape.rank == 0 ? 1 : shape[shape.rank - 1];
  if (kind == Kind::affine) {
    if (bits < 1 || bits > 8 || group < 1 || !is_float(dtype))
      return invalid(str() + ", expected 1..8 bits, a group of at least 1 and F32, F16 or BF16");
    if (columns % group != 0) {
      return invalid("row of " + std::to_string(columns) + " in groups of " +
                     std::to_string(group) + ", expected a multiple");
    }
  }
  // An element has at most 13 bytes: a code's word, a scale and a bias of its own.
  if (!fits || elements >> (empty ? 63 : 57) != 0)
    return invalid("shape " + shape.str() + " of " + str() + ", expected fewer than 2^57 elements");
  if (empty) return std::uint64_t{0};
  const auto element_bits = static_cast<std::uint64_t>(bits_of(dtype));
  if (kind == Kind::plain) {
    if (elements * element_bits % 8 != 0)
      return invalid("shape " + shape.str() + " of " + str() + ", expected whole bytes");
    return elements * element_bits / 8;
  }
  const std::uint64_t rows = elements / static_cast<std::uint64_t>(columns);
  const auto words = static_cast<std::uint64_t>(packed_words(columns, bits));
  const auto groups = static_cast<std::uint64_t>(columns / group);
  const std::uint64_t params = rows * groups * element_bits / 8;
  const auto zero_words =
      static_cast<std::uint64_t>(packed_words(static_cast<std::int64_t>(rows), bits));
  return 4 * rows * words + params + (zeros == Zeros::packed ? 4 * zero_words * groups : params);
}

}  // namespace bittern
