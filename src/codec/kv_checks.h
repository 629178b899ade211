// What the files of KvCache check alike.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "bittern/status.h"

namespace bittern::kv {

inline constexpr std::int64_t kMostTokens = std::int64_t{1} << 29;
inline constexpr std::int64_t kMostExact = std::int64_t{1} << 28;  // values of a region, of K or V

inline Status refuse(std::string_view where, const std::string& what) {
  return invalid("kv_cache: " + std::string(where) + ": " + what);
}

inline Status between(std::string_view field, std::int64_t value, std::int64_t least,
                      std::int64_t most) {
  if (value >= least && value <= most) return {};
  return refuse(field, std::to_string(value) + ", expected " + std::to_string(least) + ".." +
                           std::to_string(most));
}

inline Status has_size(const std::string& field, std::size_t size, std::int64_t expected) {
  if (static_cast<std::int64_t>(size) == expected) return {};
  return refuse(field, std::to_string(size) + " values, expected " + std::to_string(expected));
}

inline std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

}  // namespace bittern::kv
