// The names of a model's tensors and the order of their rows, in three worlds:
//   hf     Hugging Face's names, as transformers saves them
//   mlx    the names that mlx-lm's models expect after their own sanitising: stacked experts
//          (switch_mlp), conv1d weights [C, K, 1], norms with their +1 added where mlx-lm does that
//   gguf   llama.cpp's names and row orders
//   parts  what src/model runs: each quantity of naming.h as a tensor of its own, in Hugging Face's
//          order, under its own name ("layers.0.q"); norms with their +1 added. Only written
// and what config.json says as GGUF metadata, both ways.
#pragma once
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bittern/status.h"
#include "bittern/tensor.h"
#include "convert/recipe.h"
#include "formats/gguf_contents.h"

namespace bittern {

struct ModelConfig;  // model_config.h

enum class World { hf, mlx, gguf, parts };

struct NamedShape {
  std::string name;
  Shape shape;  // of the numbers, row major
};

using GgufMetadata = std::vector<std::pair<std::string, GgufData>>;

// Whether the model type of a config.json ("llama") is one whose names are known; the error lists
// those that are.
Status known_architecture(const nlohmann::ordered_json& config);

// Whether a folder's tensors are named and shaped as mlx-lm writes them or as transformers does.
// Where both do the same, hf.
World world_of_folder(std::span<const NamedShape> tensors);

// config.json of a GGUF model: everything transformers and mlx-lm need to build it. dtype names
// the weights' ("float32", "bfloat16").
Result<nlohmann::ordered_json> config_from_gguf(const GgufFile& file, std::string_view dtype);

// The config.json to write beside tensors renamed from one world of folders to the other (or from
// config_from_gguf's, which is of world hf): mlx-lm wants the rotary parameters at the top level
// and, of qwen3_5, the vision model's type; of a vision model, the language model is what is left.
// It has no quantisation: the caller adds that, and the dtype if it changes.
Result<nlohmann::ordered_json> config_for(World to, const nlohmann::ordered_json& config);

// general.architecture and all keys of the architecture llama.cpp needs; no tokenizer, no
// general.file_type. `tensors` are those of the folder.
Result<GgufMetadata> metadata_from_config(const nlohmann::ordered_json& config,
                                          std::span<const NamedShape> tensors,
                                          std::string_view model_name);

// Every tensor of the model in the world `to`, made from those in `from`. `config` is that of the
// source (for a GGUF source: what config_from_gguf gave). A tensor whose name is not understood is
// an error, as is one that is missing or whose shape is not what the config makes it; those the
// other world has no place for (rotary frequencies, mtp.*, a tied head's copy, what sees images)
// are left out and listed in `left_out`.
struct Renaming {
  std::vector<Recipe> tensors;
  std::vector<std::string> left_out;  // names, in order
  std::vector<std::string> notes;     // what the other world's programs will do differently
};
// left_out as text, one line for each kind of tensor: names that differ only in numbers, or all
// tensors of the vision part.
std::vector<std::string> kinds_left_out(std::span<const std::string> names, World to);

Result<Renaming> rename_tensors(const nlohmann::ordered_json& config,
                                std::span<const NamedShape> tensors, World from, World to);
// The same to World::parts, of a config already read.
Result<Renaming> parts_of(const ModelConfig& model, std::span<const NamedShape> tensors,
                          World from);

}  // namespace bittern
