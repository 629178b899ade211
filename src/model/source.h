// What a model on disk says it is, before its weights are read.
#pragma once
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
Result<ModelSource> read_source(const Checkpoint& source);

// An error with the file's name before it.
Status in_file(const Checkpoint& source, const Status& status);

}  // namespace bittern
