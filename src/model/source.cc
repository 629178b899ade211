#include "model/source.h"

#include <charconv>
#include <string>
#include <utility>

namespace bittern {

Status in_file(const Checkpoint& source, const Status& status) {
  return {status.code(), source.path() + ": " + std::string(status.message())};
}

std::int64_t layer_of_part(std::string_view name) {
  constexpr std::string_view kLayers = "layers.";
  if (!name.starts_with(kLayers)) return -1;
  std::int64_t layer = -1;
  std::from_chars(name.data() + kLayers.size(), name.data() + name.size(), layer);
  return layer;
}

Result<ModelSource> read_source(const Checkpoint& source, HeadOrder order) {
  ModelSource read;
  for (const CheckpointTensor& tensor : source.tensors())
    read.shapes.push_back({tensor.name, tensor.shape});
  read.world = source.gguf() != nullptr ? World::gguf : world_of_folder(read.shapes);
  if (source.gguf() == nullptr && source.config().is_null())
    return in_file(source, invalid("no config.json, expected one that tells what its tensors are"));
  auto config = source.gguf() != nullptr ? model_from_gguf(*source.gguf())
                                         : model_from_config(source.config());
  if (!config) return in_file(source, config.status());
  read.config = std::move(*config);
  read.config.value_heads_as_stored =
      order == HeadOrder::as_stored && read.world == World::gguf && read.config.gated_delta() &&
      read.config.arch() != Arch::qwen3next && read.config.value_heads != read.config.key_heads;
  auto parts = parts_of(read.config, read.shapes, read.world);
  if (!parts) return in_file(source, parts.status());
  read.parts = std::move(parts->tensors);
  return read;
}

}  // namespace bittern
