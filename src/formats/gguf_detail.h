// What reading and writing GGUF share: numbers in bytes, and how messages name keys and tensors.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

#include "formats/gguf.h"

namespace bittern::gguf_detail {

inline constexpr std::uint64_t kArrayHeader = 4 + 8;

template <class T>
T load(std::span<const std::byte> bytes, std::size_t at = 0) {
  T x;
  std::memcpy(&x, bytes.data() + at, sizeof x);
  return x;
}

inline std::string_view text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

inline std::string dec(std::uint64_t x) { return std::to_string(x); }

// A name from a file, fit for one line of an error.
std::string shown(std::string_view name);
inline std::string of_key(std::string_view key) { return "key " + shown(key) + ": "; }
inline std::string of_tensor(std::string_view name) { return "tensor " + shown(name) + ": "; }

inline std::uint64_t aligned_to(std::uint64_t n, std::uint64_t alignment) {
  return (n + alignment - 1) & ~(alignment - 1);
}

inline bool is_float(GgufType type) { return type == GgufType::f32 || type == GgufType::f64; }
inline bool is_integer(GgufType type) {
  return size_of_gguf(type) > 0 && !is_float(type) && type != GgufType::boolean;
}
inline bool is_number(GgufType type) { return is_integer(type) || is_float(type); }

// "s32 -3", "array of string": what a getter found instead.
std::string found(const GgufValue& value);

inline std::string_view key_of(const GgufKey& k) { return k.key; }
inline std::string_view name_of(const GgufTensor& t) { return t.name; }

}  // namespace bittern::gguf_detail
