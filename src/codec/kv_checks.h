// What the files of KvCache check alike.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "bittern/status.h"
#include "bittern/tensor.h"

namespace bittern::kv {

inline constexpr std::int64_t kMostTokens = std::int64_t{1} << 29;
inline constexpr std::int64_t kMostExact = std::int64_t{1} << 28;  // values of a region, of K or V

inline std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

inline bool is_empty(const Shape& shape) {  // numel() may overflow
  for (int i = 0; i < shape.rank; ++i)
    if (shape[i] == 0) return true;
  return false;
}

Status refuse(std::string_view where, const std::string& what);
Status between(std::string_view field, std::int64_t value, std::int64_t least, std::int64_t most);
Status has_size(const std::string& field, std::size_t size, std::int64_t expected);

// A view of a shape that was checked: it is on the device and has memory, aligned, and strides that
// do not overflow.
Status expect_memory(std::string_view operand, const ConstView& view, Device device = {});

// And its rows can be used in place: the values of the last axis are neighbours, no stride is
// negative, and the elements of an output do not overlap.
Status expect_strides(std::string_view operand, const ConstView& view, bool output);

}  // namespace bittern::kv
