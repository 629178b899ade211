#include "formats/safe_dtype.h"

namespace bittern {
namespace {

struct DTypeRow {
  const char* name;
  int bits;
};
constexpr DTypeRow kDTypes[kSafeDTypeCount] = {
    {"BOOL", 8},        {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
    {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
    {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
    {"I32", 32},        {"U32", 32},    {"F32", 32},    {"C64", 64},    {"F64", 64},
    {"I64", 64},        {"U64", 64},
};

}  // namespace

const char* name(SafeDType dtype) { return kDTypes[static_cast<int>(dtype)].name; }
int bits_of(SafeDType dtype) { return kDTypes[static_cast<int>(dtype)].bits; }

std::optional<SafeDType> find_safe_dtype(std::string_view name) {
  for (int i = 0; i < kSafeDTypeCount; ++i)
    if (name == kDTypes[i].name) return static_cast<SafeDType>(i);
  return std::nullopt;
}

std::optional<DType> to_dtype(SafeDType dtype) {
  for (int i = 0; i < kDTypeCount; ++i)
    if (to_safe_dtype(static_cast<DType>(i)) == dtype) return static_cast<DType>(i);
  return std::nullopt;
}

SafeDType to_safe_dtype(DType dtype) {
  constexpr SafeDType kOurs[kDTypeCount] = {
      SafeDType::f32, SafeDType::f64, SafeDType::f16, SafeDType::bf16,
      SafeDType::u8,  SafeDType::i8,  SafeDType::i32, SafeDType::u32,
  };
  return kOurs[static_cast<int>(dtype)];
}

}  // namespace bittern
