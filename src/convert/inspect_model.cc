// inspect_model: what a model says of itself, from its headers and its config.json.
#include <algorithm>
#include <filesystem>
#include <utility>

#include "bittern/convert.h"
#include "convert/call.h"
#include "convert/describe.h"
#include "core/guarded.h"
#include "formats/checkpoint.h"
#include "formats/decode.h"
#include "formats/json_tree.h"
#include "formats/safetensors.h"

namespace bittern {
namespace {

using Json = OrderedJson;

std::vector<std::uint64_t> dims(const Shape& shape) {
  return {shape.dim.begin(), shape.dim.begin() + shape.rank};
}

// Of an empty tensor the product may wrap around before it meets the zero.
std::uint64_t parameters_of(const std::vector<std::uint64_t>& shape) {
  std::uint64_t n = 1;
  for (const std::uint64_t d : shape) n *= d;
  return n;
}

std::optional<double> bits_of(std::uint64_t bytes, std::uint64_t parameters) {
  if (parameters == 0) return std::nullopt;
  return 8 * static_cast<double>(bytes) / static_cast<double>(parameters);
}

bool decodable(const Storage& storage) {
  switch (storage.kind) {
    case Storage::Kind::affine: return true;
    case Storage::Kind::blocks: return block_type(storage.type).has_value();
    case Storage::Kind::plain: break;
  }
  return storage.dtype == SafeDType::f32 || storage.dtype == SafeDType::f16 ||
         storage.dtype == SafeDType::bf16 || storage.dtype == SafeDType::f64;
}

// ---- what a GGUF file says of itself ----

void describe_gguf(const GgufFile& file, ModelDescription& model) {
  model.kind = "gguf";
  model.form = "GGUF file, version " + std::to_string(file.version());
  if (file.parts().size() > 1) model.form += ", " + std::to_string(file.parts().size()) + " parts";
  const auto text = [&](std::string_view key) -> std::optional<std::string> {
    const auto value = file.string(key);
    if (!value) return std::nullopt;
    return std::string(*value);
  };
  model.architecture = text("general.architecture");
  model.name = text("general.name");
  const std::string prefix = model.architecture.value_or("") + ".";
  const auto number = [&](const std::string& key) -> std::optional<std::uint64_t> {
    const GgufValue* value = file.find(prefix + key);
    return value == nullptr ? std::nullopt : value->as_uint();
  };
  model.layers = number("block_count");
  model.hidden_size = number("embedding_length");
  model.heads = number("attention.head_count");
  model.key_value_heads = number("attention.head_count_kv");
  model.experts = number("expert_count");
  model.context = number("context_length");
  model.vocabulary = number("vocab_size");
  if (const auto tokens = file.array("tokenizer.ggml.tokens"); !model.vocabulary && tokens)
    model.vocabulary = tokens->size();
}

// ---- what a config.json says ----

const Json* member(const Json& object, std::string_view key) {
  if (!object.is_object()) return nullptr;
  const auto found = object.find(key);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

std::optional<std::string> text_in(const Json* value) {
  if (value == nullptr || !value->is_string()) return std::nullopt;
  return value->get<std::string>();
}

// "4 bit, group 64, affine; 3 modules differ"
std::string quantization_text(const Json& settings) {
  std::string line;
  const auto add = [&](const std::string& word) { line += (line.empty() ? "" : ", ") + word; };
  if (const auto method = text_in(member(settings, "quant_method"))) add(*method);
  // compressed-tensors has groups of settings; the first is of most modules.
  const Json* groups = member(settings, "config_groups");
  const bool grouped = groups != nullptr && groups->is_object() && !groups->empty();
  const Json* weights = grouped ? member(groups->front(), "weights") : nullptr;
  const Json& all = weights == nullptr ? settings : *weights;
  const auto whole = [&](std::string_view key, std::string_view other) -> std::string {
    const Json* value = member(all, key);
    if (value == nullptr) value = member(all, other);
    return value != nullptr && value->is_number_integer() ? value->dump() : "";
  };
  if (const auto bits = whole(weights == nullptr ? "bits" : "num_bits", "w_bit"); !bits.empty())
    add(bits + " bit");
  if (const auto group = whole("group_size", "q_group_size"); !group.empty()) add("group " + group);
  if (const auto mode = text_in(member(settings, "mode"))) add(*mode);
  std::size_t modules = 0;
  if (!member(settings, "quant_method")) {
    for (const auto& [key, value] : settings.items())
      modules += value.is_object() || value.is_boolean();
  }
  if (modules > 0)
    line += "; " + std::to_string(modules) + " module" + (modules == 1 ? "" : "s") + " apart";
  return line.empty() ? "settings in config.json" : line;
}

void describe_config(const Json& config, ModelDescription& model) {
  // A model for text and images keeps the sizes of its text apart.
  const Json* text = member(config, "text_config");
  const auto find = [&](std::string_view key) {
    const Json* found = member(config, key);
    return found == nullptr && text != nullptr ? member(*text, key) : found;
  };
  const auto number =
      [&](std::initializer_list<std::string_view> spellings) -> std::optional<std::uint64_t> {
    for (const std::string_view key : spellings)
      if (const Json* value = find(key); value != nullptr && value->is_number_unsigned())
        return value->get<std::uint64_t>();
    return std::nullopt;
  };
  model.architecture = text_in(find("model_type"));
  if (const Json* classes = find("architectures"); classes && classes->is_array())
    if (!classes->empty()) model.model_class = text_in(&classes->front());
  model.name = text_in(find("_name_or_path"));
  model.layers = number({"num_hidden_layers", "n_layer", "num_layers"});
  model.hidden_size = number({"hidden_size", "n_embd", "d_model"});
  model.heads = number({"num_attention_heads", "n_head", "num_heads"});
  model.key_value_heads = number({"num_key_value_heads"});
  model.experts = number({"num_experts", "num_local_experts", "n_routed_experts"});
  model.vocabulary = number({"vocab_size"});
  model.context = number({"max_position_embeddings", "n_positions"});
  for (const std::string_view key : {"quantization", "quantization_config"}) {
    const Json* settings = find(key);
    if (settings == nullptr || !settings->is_object()) continue;
    model.quantization = quantization_text(*settings);
    model.quantization_json = settings->dump(-1, ' ', false, Json::error_handler_t::replace);
    const auto method = text_in(member(*settings, "quant_method"));
    const bool packed =
        method == "compressed-tensors" && text_in(member(*settings, "format")) == "pack-quantized";
    if (method && *method != "awq" && *method != "gptq" && !packed) {
      model.notes.push_back("quantised by " + *method +
                            ", which bittern does not decode: tensors are shown as they are "
                            "stored");
    }
    break;
  }
}

// ---- the tensors ----

// What follows from the list of tensors.
void finish(ModelDescription& model) {
  std::vector<StorageTotal>& all = model.storages;
  for (const TensorDescription& tensor : model.tensors) {
    auto found = std::find_if(all.begin(), all.end(),
                              [&](const auto& total) { return total.storage == tensor.storage; });
    if (found == all.end()) found = all.insert(all.end(), {.storage = tensor.storage});
    ++found->tensors;
    found->parameters += tensor.parameters;
    found->bytes += tensor.bytes;
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const auto& a, const auto& b) { return a.bytes > b.bytes; });

  std::vector<std::pair<std::string, std::size_t>> storages;
  for (const TensorDescription& tensor : model.tensors) {
    if (tensor.decodable) continue;
    auto found = std::find_if(storages.begin(), storages.end(),
                              [&](const auto& s) { return s.first == tensor.storage; });
    if (found == storages.end()) found = storages.insert(storages.end(), {tensor.storage, 0});
    ++found->second;
  }
  for (const auto& [storage, count] : storages) {
    model.notes.push_back(std::to_string(count) + (count == 1 ? " tensor of " : " tensors of ") +
                          storage + ": bittern does not turn it into numbers");
  }
}

// One part of a split file whose other parts are not there, or wrong.
ModelDescription describe_part(const GgufFile& file, const Status& why) {
  ModelDescription model;
  model.path = file.path();
  model.files = {file.path()};
  describe_gguf(file, model);
  model.form += ", one part of a split file";
  for (const GgufTensor& tensor : file.tensors()) {
    model.tensors.push_back({.name = std::string(tensor.name),
                             .shape = dims(tensor.shape),
                             .storage = info(tensor.type).name,
                             .parameters = parameters_of(dims(tensor.shape)),
                             .bytes = tensor.bytes.size(),
                             .decodable = info(tensor.type).readable});
  }
  finish(model);
  model.notes.push_back("this part alone, as the whole does not open: " +
                        std::string(why.message()));
  return model;
}

// A folder, or a safetensors file, that is packed in a way bittern does not read.
Result<ModelDescription> describe_stored(const std::string& path, const Status& why) {
  ModelDescription model;
  model.path = path;
  model.files = {path};
  const auto list = [&](const SafetensorsTensor& tensor) {
    model.tensors.push_back({.name = tensor.name,
                             .shape = tensor.shape,
                             .storage = name(tensor.dtype),
                             .parameters = parameters_of(tensor.shape),
                             .bytes = tensor.end - tensor.begin,
                             .decodable = decodable(Storage::plain(tensor.dtype))});
  };
  namespace fs = std::filesystem;
  fs::path config_path = path;
  if (std::error_code error; fs::is_directory(path, error)) {
    const auto folder = SafetensorsFolder::open(path);
    if (!folder) return folder.status();
    for (std::size_t i = 0; i < folder->size(); ++i) list(folder->tensor(i));
    model.kind = "huggingface";
    model.form = "folder of safetensors";
  } else {
    const auto file = SafetensorsFile::open(path);
    if (!file) return file.status();
    for (const SafetensorsTensor& tensor : file->tensors()) list(tensor);
    model.kind = "safetensors";
    model.form = "safetensors file";
    config_path = config_path.parent_path();
  }
  config_path /= "config.json";
  if (const auto text = MappedFile::open(config_path.string())) {
    const auto config = parse_json_tree(config_path.string(), text->bytes());
    if (!config) return config.status();
    describe_config(*config, model);
  }
  finish(model);
  model.notes.push_back(
      "tensors are shown as they are stored, as bittern does not read the model: " +
      std::string(why.message()));
  return model;
}

}  // namespace

ModelDescription describe(const Checkpoint& checkpoint) {
  ModelDescription model;
  model.path = checkpoint.path();
  model.files = checkpoint.files();
  switch (checkpoint.kind()) {
    case Checkpoint::Kind::gguf: describe_gguf(*checkpoint.gguf(), model); break;
    case Checkpoint::Kind::hf:
      model.kind = "huggingface";
      model.form = "Hugging Face folder";
      break;
    case Checkpoint::Kind::mlx:
      model.kind = "mlx";
      model.form = "MLX folder";
      break;
    case Checkpoint::Kind::safetensors:
      model.kind = "safetensors";
      model.form = "safetensors file";
      break;
  }
  if (checkpoint.config().is_object()) describe_config(checkpoint.config(), model);
  for (const CheckpointTensor& tensor : checkpoint.tensors()) {
    model.tensors.push_back({.name = tensor.name,
                             .shape = dims(tensor.shape),
                             .storage = tensor.storage.str(),
                             .parameters = parameters_of(dims(tensor.shape)),
                             .bytes = tensor.bytes(),
                             .decodable = decodable(tensor.storage)});
  }
  finish(model);
  return model;
}

std::optional<double> TensorDescription::bits_per_weight() const noexcept {
  return bits_of(bytes, parameters);
}

std::uint64_t ModelDescription::parameters() const noexcept {
  std::uint64_t n = 0;
  for (const TensorDescription& tensor : tensors) n += tensor.parameters;
  return n;
}

std::uint64_t ModelDescription::bytes() const noexcept {
  std::uint64_t n = 0;
  for (const TensorDescription& tensor : tensors) n += tensor.bytes;
  return n;
}

std::optional<double> ModelDescription::bits_per_weight() const noexcept {
  return bits_of(bytes(), parameters());
}

Result<ModelDescription> inspect_model(const std::string& path) noexcept {
  return guarded("inspect_model", [&]() -> Result<ModelDescription> {
    const CallSettings settings({});
    if (path.empty()) return invalid("path: empty, expected a model to read");
    const auto checkpoint = Checkpoint::open(path);
    if (checkpoint) {
      ModelDescription model = describe(*checkpoint);
      BITTERN_TRY(checkpoint->unchanged());
      return model;
    }
    if (const auto part = GgufFile::open(path, true); part && part->find("split.count") != nullptr)
      return describe_part(*part, checkpoint.status());
    if (checkpoint.status().code() == Code::unsupported)
      if (auto stored = describe_stored(path, checkpoint.status())) return stored;
    return checkpoint.status();
  });
}

}  // namespace bittern
