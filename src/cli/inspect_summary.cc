// What a model's files say of it.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <initializer_list>
#include <utility>

#include "cli/inspect.h"
#include "formats/decode.h"
#include "formats/json_tree.h"
#include "formats/safetensors.h"

namespace bittern::cli {

std::vector<std::uint64_t> dims(const Shape& shape) {
  return {shape.dim.begin(), shape.dim.begin() + shape.rank};
}

namespace {

// Of an empty tensor the product may wrap around before it meets the zero.
std::uint64_t parameters_of(const std::vector<std::uint64_t>& shape) {
  std::uint64_t n = 1;
  for (const std::uint64_t d : shape) n *= d;
  return n;
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

void describe_gguf(const GgufFile& file, Summary& summary) {
  summary.kind = "gguf";
  summary.form = fmt::format("GGUF file, version {}", file.version());
  if (file.parts().size() > 1) summary.form += fmt::format(", {} parts", file.parts().size());
  const auto text = [&](std::string_view key) -> std::optional<std::string> {
    const auto value = file.string(key);
    if (!value) return std::nullopt;
    return std::string(*value);
  };
  summary.architecture = text("general.architecture");
  summary.name = text("general.name");
  const std::string prefix = summary.architecture.value_or("") + ".";
  const auto number = [&](const std::string& key) -> std::optional<std::uint64_t> {
    const GgufValue* value = file.find(prefix + key);
    return value == nullptr ? std::nullopt : value->as_uint();
  };
  summary.layers = number("block_count");
  summary.hidden_size = number("embedding_length");
  summary.heads = number("attention.head_count");
  summary.key_value_heads = number("attention.head_count_kv");
  summary.experts = number("expert_count");
  summary.context = number("context_length");
  summary.vocabulary = number("vocab_size");
  if (const auto tokens = file.array("tokenizer.ggml.tokens"); !summary.vocabulary && tokens)
    summary.vocabulary = tokens->size();
}

}  // namespace

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

namespace {

void describe_config(const Json& config, Summary& summary) {
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
  summary.architecture = text_in(find("model_type"));
  if (const Json* classes = find("architectures"); classes && classes->is_array())
    if (!classes->empty()) summary.model_class = text_in(&classes->front());
  summary.name = text_in(find("_name_or_path"));
  summary.layers = number({"num_hidden_layers", "n_layer", "num_layers"});
  summary.hidden_size = number({"hidden_size", "n_embd", "d_model"});
  summary.heads = number({"num_attention_heads", "n_head", "num_heads"});
  summary.key_value_heads = number({"num_key_value_heads"});
  summary.experts = number({"num_experts", "num_local_experts", "n_routed_experts"});
  summary.vocabulary = number({"vocab_size"});
  summary.context = number({"max_position_embeddings", "n_positions"});
  for (const std::string_view key : {"quantization", "quantization_config"}) {
    const Json* settings = find(key);
    if (settings == nullptr || !settings->is_object()) continue;
    summary.quantization = *settings;
    const auto method = text_in(member(*settings, "quant_method"));
    if (method && *method != "awq" && *method != "gptq") {
      summary.notes.push_back("quantised by " + printable(*method) +
                              ", which bittern does not decode: tensors are shown as they are "
                              "stored");
    }
    break;
  }
}

// ---- the summary ----

void note_what_is_not_decoded(Summary& summary) {
  std::vector<std::pair<std::string, std::size_t>> storages;
  for (const Listed& tensor : summary.tensors) {
    if (tensor.decodable) continue;
    auto found = std::find_if(storages.begin(), storages.end(),
                              [&](const auto& s) { return s.first == tensor.storage; });
    if (found == storages.end()) found = storages.insert(storages.end(), {tensor.storage, 0});
    ++found->second;
  }
  for (const auto& [storage, count] : storages) {
    summary.notes.push_back(fmt::format("{} of {}: bittern does not turn it into numbers",
                                        count == 1 ? "1 tensor" : fmt::format("{} tensors", count),
                                        storage));
  }
}

// One part of a split file whose other parts are not there, or wrong.
Summary summarize_part(const GgufFile& file, const Status& why) {
  Summary summary;
  summary.path = file.path();
  summary.files = {file.path()};
  describe_gguf(file, summary);
  summary.form += ", one part of a split file";
  for (const GgufTensor& tensor : file.tensors()) {
    summary.tensors.push_back({.name = std::string(tensor.name),
                               .shape = dims(tensor.shape),
                               .storage = info(tensor.type).name,
                               .parameters = parameters_of(dims(tensor.shape)),
                               .bytes = tensor.bytes.size(),
                               .decodable = info(tensor.type).readable});
  }
  note_what_is_not_decoded(summary);
  summary.notes.push_back("this part alone, as the whole does not open: " +
                          std::string(why.message()));
  return summary;
}

// A folder, or a safetensors file, that is packed in a way bittern does not read.
Result<Summary> summarize_stored(const std::string& path, const Status& why) {
  Summary summary;
  summary.path = path;
  summary.files = {path};
  const auto list = [&](const SafetensorsTensor& tensor) {
    summary.tensors.push_back({.name = tensor.name,
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
    summary.kind = "huggingface";
    summary.form = "folder of safetensors";
  } else {
    const auto file = SafetensorsFile::open(path);
    if (!file) return file.status();
    for (const SafetensorsTensor& tensor : file->tensors()) list(tensor);
    summary.kind = "safetensors";
    summary.form = "safetensors file";
    config_path = config_path.parent_path();
  }
  config_path /= "config.json";
  if (const auto text = MappedFile::open(config_path.string())) {
    const auto config = parse_json_tree(config_path.string(), text->bytes());
    if (!config) return config.status();
    describe_config(*config, summary);
  }
  note_what_is_not_decoded(summary);
  summary.notes.push_back(
      "tensors are shown as they are stored, as bittern does not read the "
      "model: " +
      std::string(why.message()));
  return summary;
}

}  // namespace

Summary summarize(const Checkpoint& model) {
  Summary summary;
  summary.path = model.path();
  summary.files = model.files();
  switch (model.kind()) {
    case Checkpoint::Kind::gguf: describe_gguf(*model.gguf(), summary); break;
    case Checkpoint::Kind::hf:
      summary.kind = "huggingface";
      summary.form = "Hugging Face folder";
      break;
    case Checkpoint::Kind::mlx:
      summary.kind = "mlx";
      summary.form = "MLX folder";
      break;
    case Checkpoint::Kind::safetensors:
      summary.kind = "safetensors";
      summary.form = "safetensors file";
      break;
  }
  if (model.config().is_object()) describe_config(model.config(), summary);
  for (const CheckpointTensor& tensor : model.tensors()) {
    summary.tensors.push_back({.name = tensor.name,
                               .shape = dims(tensor.shape),
                               .storage = tensor.storage.str(),
                               .parameters = parameters_of(dims(tensor.shape)),
                               .bytes = tensor.bytes(),
                               .decodable = decodable(tensor.storage)});
  }
  note_what_is_not_decoded(summary);
  return summary;
}

Result<Summary> summarize(const std::string& path) {
  const auto model = Checkpoint::open(path);
  if (model) {
    Summary summary = summarize(*model);
    BITTERN_TRY(model->unchanged());
    return summary;
  }
  if (const auto part = GgufFile::open(path, true); part && part->find("split.count") != nullptr)
    return summarize_part(*part, model.status());
  if (model.status().code() == Code::unsupported)
    if (auto stored = summarize_stored(path, model.status())) return stored;
  return model.status();
}

std::vector<StorageTotal> totals(const Summary& summary) {
  std::vector<StorageTotal> all;
  for (const Listed& tensor : summary.tensors) {
    auto found = std::find_if(all.begin(), all.end(),
                              [&](const auto& total) { return total.storage == tensor.storage; });
    if (found == all.end()) found = all.insert(all.end(), {.storage = tensor.storage});
    ++found->tensors;
    found->parameters += tensor.parameters;
    found->bytes += tensor.bytes;
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const auto& a, const auto& b) { return a.bytes > b.bytes; });
  return all;
}

}  // namespace bittern::cli
