// What reading and writing safetensors share: names of files, sizes of tensors, orders by name.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "formats/json_events.h"
#include "formats/safetensors.h"

namespace bittern::safetensors_detail {

inline constexpr const char* kMetadata = "__metadata__";
inline constexpr const char* kSingle = "model.safetensors";
inline constexpr const char* kIndex = "model.safetensors.index.json";

// "[2,3]"
std::string list(std::span<const std::uint64_t> values);

// Bytes of a tensor. No product of some of its dimensions overflows either, a zero or not.
Result<std::uint64_t> byte_size(const std::string& tensor, const SafetensorsSpec& spec);

Status check_name(const std::string& where, std::string_view name);

// Keys ascend afterwards; one that is given twice is an error.
Status sort_metadata(const std::string& where, SafetensorsMetadata& metadata);

// The order of `tensors` by name, without duplicates.
Status sort_names(const std::string& where, const auto& tensors,
                  std::vector<std::uint32_t>& by_name) {
  by_name.resize(tensors.size());
  std::iota(by_name.begin(), by_name.end(), 0u);
  std::sort(by_name.begin(), by_name.end(),
            [&](auto a, auto b) { return tensors[a].name < tensors[b].name; });
  const auto twice = std::adjacent_find(by_name.begin(), by_name.end(), [&](auto a, auto b) {
    return tensors[a].name == tensors[b].name;
  });
  if (twice == by_name.end()) return {};
  return invalid(tensor_in(where, tensors[*twice].name) + "given twice, expected once");
}

}  // namespace bittern::safetensors_detail
