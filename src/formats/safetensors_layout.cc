#include "formats/safetensors_layout.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <tuple>
#include <utility>

#include "core/guarded.h"
#include "formats/json_events.h"
#include "formats/safetensors_detail.h"
#include "formats/side_file.h"

namespace bittern {

using namespace safetensors_detail;

namespace {

using Json = nlohmann::json;

// A JSON string, or nothing where `text` is not UTF-8.
std::optional<std::string> json_string(const std::string& text) {
  try {
    return Json(text).dump();
  } catch (const Json::exception&) {
    return std::nullopt;
  }
}

// Fills in the heads of files whose names are known and whose tensors know their file.
Status lay_out_files(const std::string& where, const std::string& folder,
                     std::span<const SafetensorsSpec> tensors, SafetensorsMetadata metadata,
                     OutputLayout& layout) {
  std::string opening = "{";
  BITTERN_TRY(sort_metadata(where, metadata));
  for (const auto& [key, value] : metadata) {
    const auto k = json_string(key), v = json_string(value);
    if (!k || !v)
      return invalid(where + ": __metadata__: " + in_quotes(key) + ": not UTF-8, expected UTF-8");
    opening += opening.size() == 1 ? std::string("\"__metadata__\":{") : std::string(",");
    opening += *k + ":" + *v;
  }
  if (!metadata.empty()) opening += "}";

  std::vector<std::uint32_t> order;
  BITTERN_TRY(sort_names(where, tensors, order));
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) {
    return std::tuple(layout.tensors[a].file, tensors[b].dtype) <
           std::tuple(layout.tensors[b].file, tensors[a].dtype);
  });
  std::size_t next = 0;
  for (std::uint32_t i = 0; i < layout.files.size(); ++i) {
    OutputLayout::File& file = layout.files[i];
    std::string header = opening;
    std::uint64_t offset = 0;
    const std::size_t first = next;
    for (; next < order.size() && layout.tensors[order[next]].file == i; ++next) {
      const SafetensorsSpec& tensor = tensors[order[next]];
      OutputLayout::Extent& extent = layout.tensors[order[next]];
      BITTERN_TRY(check_name(where, tensor.name));
      const auto escaped = json_string(tensor.name);
      if (!escaped || tensor.name == kMetadata) {
        return invalid(tensor_in(where, tensor.name) + (escaped ? "reserved" : "not UTF-8") +
                       ", expected another name");
      }
      header.append(header.size() == 1 ? "" : ",").append(*escaped).append(":{\"dtype\":\"");
      header.append(name(tensor.dtype)).append("\",\"shape\":").append(list(tensor.shape));
      extent.begin = offset;  // of the data, until the header's size is known
      offset += extent.bytes;
      header.append(",\"data_offsets\":").append(list(std::vector{extent.begin, offset}));
      header.append("}");
    }
    header += "}";
    header.append((8 - header.size() % 8) % 8, ' ');
    if (header.size() > kSafetensorsMaxHeader) {
      return invalid(folder + file.name + ": header of " + std::to_string(header.size()) +
                     " bytes, expected at most " + std::to_string(kSafetensorsMaxHeader));
    }
    for (std::size_t byte = 0; byte < 8; ++byte)
      file.head.push_back(static_cast<char>(header.size() >> (8 * byte) & 255));
    file.head += header;
    file.bytes = file.head.size() + offset;
    for (std::size_t t = first; t < next; ++t) layout.tensors[order[t]].begin += file.head.size();
  }
  return {};
}

Status size_tensors(const std::string& where, std::span<const SafetensorsSpec> tensors,
                    OutputLayout& layout) {
  std::uint64_t total = 0;
  for (const SafetensorsSpec& tensor : tensors) {
    const auto size = byte_size(tensor_in(where, tensor.name), tensor);
    if (!size) return size.status();
    layout.tensors.push_back({.bytes = *size});
    total += *size;
    if (total >> 61 != 0) return invalid(where + ": 2^61 bytes or more, expected less");
  }
  return {};
}

}  // namespace

Result<OutputLayout> lay_out_safetensors(const std::string& folder,
                                         std::span<const SafetensorsSpec> tensors,
                                         std::uint64_t shard_bytes, SafetensorsMetadata metadata) {
  return guarded(folder, [&]() -> Result<OutputLayout> {
    if (shard_bytes == 0) return invalid(folder + ": shards of 0 bytes, expected at least 1");
    OutputLayout layout;
    BITTERN_TRY(size_tensors(folder, tensors, layout));
    std::uint32_t shard = 0;
    std::uint64_t filled = 0;
    for (OutputLayout::Extent& tensor : layout.tensors) {
      if (filled != 0 && (filled > shard_bytes || tensor.bytes > shard_bytes - filled)) {
        ++shard;
        filled = 0;
      }
      tensor.file = shard;
      filled += tensor.bytes;
    }
    const std::uint32_t count = shard + 1;
    if (count > kSafetensorsMaxShards) {
      return invalid(folder + ": " + std::to_string(count) + " shards, expected at most " +
                     std::to_string(kSafetensorsMaxShards));
    }
    for (std::uint32_t i = 1; count > 1 && i <= count; ++i) {
      const auto five = [](std::uint32_t n) { return std::to_string(100000 + n).substr(1); };
      layout.files.push_back({.name = "model-" + five(i) + "-of-" + five(count) + ".safetensors"});
    }
    if (count == 1) layout.files.push_back({.name = kSingle});
    const std::string slashed = with_slash(folder);
    BITTERN_TRY(lay_out_files(slashed + (count == 1 ? kSingle : kIndex), slashed, tensors,
                              std::move(metadata), layout));
    return layout;
  });
}

Result<std::string> safetensors_index(const std::string& folder,
                                      std::span<const SafetensorsSpec> tensors,
                                      const OutputLayout& layout,
                                      std::span<const std::string> metadata) {
  std::vector<std::uint32_t> order;
  BITTERN_TRY(sort_names(with_slash(folder) + kIndex, tensors, order));
  std::string text = "{\n  \"metadata\": {";
  for (std::size_t i = 0; i < metadata.size(); ++i)
    text += (i == 0 ? "\n    " : ",\n    ") + metadata[i];
  text += "\n  },\n  \"weight_map\": {";
  for (std::size_t i = 0; i < order.size(); ++i) {
    text += (i == 0 ? "\n    " : ",\n    ") + *json_string(tensors[order[i]].name) + ": \"" +
            layout.files[layout.tensors[order[i]].file].name + "\"";
  }
  text += "\n  }\n}\n";
  return text;
}

}  // namespace bittern
