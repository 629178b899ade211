// JSON as a tree, for configs: keys keep their order, and memory is bounded even for text that is
// not trusted.
#pragma once
#include <cstddef>
#include <nlohmann/json.hpp>
#include <span>
#include <string>

#include "bittern/status.h"

namespace bittern {

using OrderedJson = nlohmann::ordered_json;

// Of a config. A value takes about 100 bytes beside its text: 26 MiB at most.
inline constexpr std::size_t kJsonMaxBytes = std::size_t{16} << 20;
inline constexpr std::size_t kJsonMaxValues = std::size_t{1} << 18;

// A key that is given twice in one object is an error; messages begin with `where`.
Result<OrderedJson> parse_json_tree(const std::string& where, std::span<const std::byte> text,
                                    std::size_t most_bytes = kJsonMaxBytes,
                                    std::size_t most_values = kJsonMaxValues);

// One short line that shows a value of a file, whatever its size and depth.
std::string shown(const OrderedJson& value);

}  // namespace bittern
