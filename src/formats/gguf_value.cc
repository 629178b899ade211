// The values of GGUF's metadata.
#include <algorithm>
#include <bit>
#include <cstdio>
#include <limits>

#include "formats/gguf_detail.h"

namespace bittern {

using namespace gguf_detail;

std::string gguf_detail::shown(std::string_view name) {
  constexpr std::size_t kMostShown = 80;
  std::string out;
  for (const char c : name.substr(0, kMostShown)) {
    if (c >= ' ' && c <= '~' && c != '\\') {
      out += c;
    } else {
      char escape[5];
      std::snprintf(escape, sizeof escape, "\\x%02x", static_cast<unsigned char>(c));
      out += escape;
    }
  }
  return name.size() > kMostShown ? out + "..." : out;
}

std::string gguf_detail::found(const GgufValue& value) {
  std::string type = name(value.type());
  if (value.type() == GgufType::array) return type + " of " + name(value.element());
  if (const auto x = value.as_uint()) return type + " " + std::to_string(*x);
  if (const auto x = value.as_integer()) return type + " " + std::to_string(*x);
  if (const auto x = value.as_bool()) return type + (*x ? " true" : " false");
  return type;
}

namespace {

static_assert(std::endian::native == std::endian::little);

// Calls f with the scalar of this type; false for strings and arrays.
template <class F>
bool with_scalar(GgufType type, std::span<const std::byte> bytes, F&& f) {
  switch (type) {
    case GgufType::u8: return f(load<std::uint8_t>(bytes)), true;
    case GgufType::s8: return f(load<std::int8_t>(bytes)), true;
    case GgufType::u16: return f(load<std::uint16_t>(bytes)), true;
    case GgufType::s16: return f(load<std::int16_t>(bytes)), true;
    case GgufType::u32: return f(load<std::uint32_t>(bytes)), true;
    case GgufType::s32: return f(load<std::int32_t>(bytes)), true;
    case GgufType::u64: return f(load<std::uint64_t>(bytes)), true;
    case GgufType::s64: return f(load<std::int64_t>(bytes)), true;
    case GgufType::f32: return f(load<float>(bytes)), true;
    case GgufType::f64: return f(load<double>(bytes)), true;
    case GgufType::boolean: return f(load<std::uint8_t>(bytes) != 0), true;
    case GgufType::string:
    case GgufType::array: break;
  }
  return false;
}

// The size of a checked value that starts `bytes`.
std::size_t encoded_size(GgufType type, std::span<const std::byte> bytes) {
  if (const std::uint64_t size = size_of_gguf(type)) return size;
  if (type == GgufType::string) return 8 + load<std::uint64_t>(bytes);
  const auto element = static_cast<GgufType>(load<std::uint32_t>(bytes));
  const auto count = load<std::uint64_t>(bytes, 4);
  if (const std::uint64_t size = size_of_gguf(element)) return kArrayHeader + count * size;
  std::size_t at = kArrayHeader;
  for (std::uint64_t i = 0; i < count; ++i) at += encoded_size(element, bytes.subspan(at));
  return at;
}

}  // namespace

const char* name(GgufType type) {
  static constexpr const char* kNames[kGgufTypeCount] = {
      "u8", "s8", "u16", "s16", "u32", "s32", "f32", "bool", "string", "array", "u64", "s64", "f64",
  };
  return kNames[static_cast<std::uint32_t>(type)];
}

std::uint64_t size_of_gguf(GgufType type) {
  static constexpr std::uint64_t kSizes[kGgufTypeCount] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
  return kSizes[static_cast<std::uint32_t>(type)];
}

GgufValue GgufValue::make(GgufType type, std::span<const std::byte> encoded) {
  GgufValue value;
  value.type_ = type;
  value.encoded_ = encoded;
  if (type == GgufType::array) {
    value.element_ = static_cast<GgufType>(load<std::uint32_t>(encoded));
    value.count_ = load<std::uint64_t>(encoded, 4);
  }
  return value;
}

GgufValue GgufValue::next(std::size_t& from) const {
  const auto rest = encoded_.subspan(kArrayHeader + from);
  const std::size_t size = encoded_size(element_, rest);
  from += size;
  return make(element_, rest.first(size));
}

GgufValue GgufValue::at(std::uint64_t i) const {
  const std::uint64_t size = size_of_gguf(element_);
  return make(element_, encoded_.subspan(kArrayHeader + i * size, size));
}

std::optional<std::uint64_t> GgufValue::as_uint() const {
  std::optional<std::uint64_t> out;
  if (!is_integer(type_)) return out;
  with_scalar(type_, encoded_, [&](auto x) {
    if (x >= decltype(x){0}) out = static_cast<std::uint64_t>(x);
  });
  return out;
}

std::optional<std::int64_t> GgufValue::as_integer() const {
  std::optional<std::int64_t> out;
  if (!is_integer(type_)) return out;
  if (type_ == GgufType::u64 &&
      load<std::uint64_t>(encoded_) > std::uint64_t{std::numeric_limits<std::int64_t>::max()})
    return out;
  with_scalar(type_, encoded_, [&](auto x) { out = static_cast<std::int64_t>(x); });
  return out;
}

std::optional<double> GgufValue::as_number() const {
  std::optional<double> out;
  if (!is_number(type_)) return out;
  with_scalar(type_, encoded_, [&](auto x) { out = static_cast<double>(x); });
  return out;
}

std::optional<bool> GgufValue::as_bool() const {
  if (type_ != GgufType::boolean) return {};
  return load<std::uint8_t>(encoded_) != 0;
}

std::optional<std::string_view> GgufValue::as_string() const {
  if (type_ != GgufType::string) return {};
  return text(encoded_.subspan(8));
}

}  // namespace bittern
