// What a model on disk says it is, before its weights are read.
#pragma once
#include <cstdint>
#include <string_view>
#include <vector>

#include "bittern/status.h"
#include "convert/architecture.h"
#include "convert/model_config.h"
#include "convert/recipe.h"
#include "formats/checkpoint.h"

namespace bittern {

struct ModelSource {
  ModelConfig config;
  std::vector<NamedShape> shapes;  // of its tensors
  World world = World::hf;         // whose names these are
  std::vector<Recipe> parts;       // the decoder's tensors, each made of them
};
// The order of a gated delta net's value heads in the parts: that of the config, or llama.cpp's
// where the file has it, which suits the ops too, and blocks of columns then stay whole.
enum class HeadOrder { as_stored, of_config };
Result<ModelSource> read_source(const Checkpoint& source, HeadOrder order = HeadOrder::as_stored);

// "layers.12.q" is of layer 12; -1: of none.
std::int64_t layer_of_part(std::string_view name);

// An error with the file's name before it.
Status in_file(const Checkpoint& source, const Status& status);

}  // namespace bittern
