// Safetensors files to be written: how each begins, where the bytes of each tensor go, and the
// index of several.
#pragma once
#include <cstdint>
#include <span>
#include <string>

#include "bittern/status.h"
#include "formats/mapped_file.h"
#include "formats/safetensors.h"

namespace bittern {

// A folder's model.safetensors, or, where the tensors have more than `shard_bytes` bytes,
// model-00001-of-00005.safetensors and so on: tensors fill the shards in the given order, and a
// larger tensor has a shard of its own. Within a file the tensors have the order of the reference
// implementation, by decreasing alignment and then by name, which keeps every tensor aligned. Error
// messages begin with `folder`.
Result<OutputLayout> lay_out_safetensors(const std::string& folder,
                                         std::span<const SafetensorsSpec> tensors,
                                         std::uint64_t shard_bytes,
                                         SafetensorsMetadata metadata = {});
// model.safetensors.index.json of such a folder; `metadata` is JSON, a member each: "\"a\": 1".
Result<std::string> safetensors_index(const std::string& folder,
                                      std::span<const SafetensorsSpec> tensors,
                                      const OutputLayout& layout,
                                      std::span<const std::string> metadata);

}  // namespace bittern
