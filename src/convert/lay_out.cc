// The files of the output: where each tensor is written, and the other files.
#include <algorithm>
#include <cstdio>
#include <map>
#include <set>
#include <span>
#include <system_error>
#include <utility>

#include "convert/general_metadata.h"
#include "convert/mix.h"
#include "convert/planner.h"
#include "convert/replace.h"
#include "convert/tokenizer.h"
#include "convert/tokenizer_table.h"
#include "core/guarded.h"
#include "formats/gguf_contents.h"
#include "formats/json_events.h"
#include "formats/json_tree.h"
#include "formats/mapped_file.h"
#include "formats/safetensors_layout.h"
#include "formats/side_file.h"

namespace bittern {

namespace {

using Json = nlohmann::ordered_json;

constexpr std::uint64_t kShardBytes = std::uint64_t{5} << 30;  // as mlx-lm cuts
constexpr std::size_t kMostParts = 65535;                      // of a GGUF file: a u16

Result<std::string> read_text(const std::string& path) {
  // An empty file is not mapped, and may stand beside a model.
  if (const auto stamp = FileStamp::of(path); stamp && stamp->size == 0) return std::string();
  const auto file = MappedFile::open(path);
  if (!file) return file.status();
  std::string text(reinterpret_cast<const char*>(file->bytes().data()), file->bytes().size());
  BITTERN_TRY(file->unchanged());
  return text;
}

// Bits and group of affine tensors, and how many weights have them.
using Setting = std::pair<int, int>;
using SettingWeights = std::map<Setting, std::uint64_t>;
SettingWeights weights_by_setting(const std::vector<OutputTensor>& tensors) {
  SettingWeights weights;
  for (const OutputTensor& tensor : tensors)
    if (tensor.to.kind == Storage::Kind::affine)
      weights[{tensor.to.bits, tensor.to.group}] +=
          static_cast<std::uint64_t>(tensor.recipe.shape.numel());
  return weights;
}
Setting most_used(const SettingWeights& weights) {
  return std::max_element(weights.begin(), weights.end(),
                          [](const auto& a, const auto& b) { return a.second < b.second; })
      ->first;
}

}  // namespace

std::string module_of(std::string_view name) {
  return std::string(name.substr(0, name.rfind('.')));
}

bool hides_a_key(std::string_view name) {
  const std::string module = module_of(name);
  return module == "bits" || module == "group_size" || module == "mode";
}

Status ConversionPlanner::lay_out_gguf() {
  const std::vector<std::size_t> ends = part_ends();
  if (ends.size() > kMostParts)
    return invalid((options_.split_bytes > 0 ? "@{split_max_size}: " : "@{split_max_tensors}: ") +
                   std::to_string(ends.size()) + " parts, expected at most " +
                   std::to_string(kMostParts));
  std::vector<GgufContents> writers;
  for (std::size_t part = 0; part < ends.size(); ++part)
    writers.emplace_back(options_.splits() ? part_name(part, ends.size()) : out_);
  const auto add = [&](const std::string& key, const GgufData& value) {
    return writers[0].add(key, value);
  };
  if (source_.gguf() != nullptr) {
    for (const GgufKey& entry : source_.gguf()->keys()) {
      const std::string key(entry.key);
      if (key.starts_with("split.") || key == "general.file_type" ||
          key == "general.quantization_version" || key.starts_with("quantize.imatrix."))
        continue;
      BITTERN_TRY(add(key, GgufData(entry.value)));
    }
  } else {
    std::int64_t vocabulary = 0;
    for (const OutputTensor& tensor : conversion_.tensors_)
      if (tensor.recipe.name == "token_embd.weight") vocabulary = tensor.recipe.shape[0];
    bool like_phi3 = false;
    auto tokenizer = tokenizer_to_gguf(source_.path(), vocabulary, &like_phi3);
    if (!tokenizer) return of_source(tokenizer.status());
    auto general = general_to_gguf(source_.path(), conversion_.notes_);
    if (!general) return of_source(general.status());
    std::string name = model_name();
    std::erase_if(*general, [&](const auto& pair) {
      if (pair.first != "general.name" || pair.second.type() != GgufType::string) return false;
      const auto bytes = pair.second.encoded().subspan(sizeof(std::uint64_t));
      name.assign(reinterpret_cast<const char*>(bytes.data()), bytes.size());
      return true;
    });
    if (const std::string safe = named_for(name, like_phi3); safe != name) {
      note("general.name: " + in_quotes(safe) + " in place of " + in_quotes(name) +
           ", as llama.cpp knows by the name Phi-3 whether tokens take the spaces after them");
      name = safe;
    }
    auto metadata = metadata_from_config(config_, shapes_, name);
    if (!metadata) return of_source(metadata.status());
    for (const auto& [key, value] : *metadata) {
      const auto said = [&wanted = key](const auto& pair) { return pair.first == wanted; };
      if (std::ranges::none_of(*general, said)) BITTERN_TRY(add(key, value));
    }
    for (const auto& [key, value] : *general) BITTERN_TRY(add(key, value));
    for (const auto& [key, value] : *tokenizer) BITTERN_TRY(add(key, value));
  }
  BITTERN_TRY(add("general.quantization_version", GgufData(std::uint32_t{2})));
  BITTERN_TRY(add("general.file_type", GgufData(file_type())));
  if (importance_used_)
    BITTERN_TRY(add("quantize.imatrix.file",
                    GgufData(options_.imatrix.substr(options_.imatrix.rfind('/') + 1))));
  for (std::size_t part = 0; options_.splits() && part < ends.size(); ++part) {
    const auto tensors = static_cast<std::int32_t>(conversion_.tensors_.size());
    GgufContents& writer = writers[part];
    BITTERN_TRY(writer.add("split.no", GgufData(static_cast<std::uint16_t>(part))));
    BITTERN_TRY(writer.add("split.count", GgufData(static_cast<std::uint16_t>(ends.size()))));
    BITTERN_TRY(writer.add("split.tensors.count", GgufData(tensors)));
  }
  for (std::size_t i = 0, part = 0; i < conversion_.tensors_.size(); ++i) {
    OutputTensor& tensor = conversion_.tensors_[i];
    const auto type = ggml_type_of(tensor.to);
    if (!type)
      return unsupported(source_.path() + ": tensor " + source_of(tensor.recipe) + ": " +
                         tensor.to.str() + ": GGUF has no such type");
    tensor.part = i;
    if (i == ends[part]) ++part;
    BITTERN_TRY(writers[part].add_tensor(tensor.recipe.name, *type, tensor.recipe.shape));
  }
  OutputLayout& layout = conversion_.layout_;
  for (const GgufContents& writer : writers) {
    OutputLayout one = writer.lay_out();
    for (OutputLayout::Extent& extent : one.tensors)
      extent.file = static_cast<std::uint32_t>(layout.files.size());
    layout.files.push_back(std::move(one.files[0]));
    layout.tensors.insert(layout.tensors.end(), one.tensors.begin(), one.tensors.end());
  }
  if (options_.splits())
    note(std::to_string(ends.size()) + (ends.size() == 1 ? " file, " : " files, ") +
         layout.files.front().name + (ends.size() == 1 ? "" : " to " + layout.files.back().name));
  if (options_.splits()) note_other_parts(ends.size());
  return {};
}

// The name of OUT without .gguf.
std::string ConversionPlanner::part_stem() const {
  constexpr std::string_view kEnd = ".gguf";
  std::string stem = out_.substr(out_.rfind('/') + 1);
  if (stem.ends_with(kEnd)) stem.resize(stem.size() - kEnd.size());
  return stem;
}

// As llama-gguf-split calls it: OUT-00001-of-00003.gguf.
std::string ConversionPlanner::part_name(std::size_t part, std::size_t parts) const {
  char numbers[32];
  std::snprintf(numbers, sizeof numbers, "-%05zu-of-%05zu.gguf", part + 1, parts);
  return part_stem() + numbers;
}

// A set with another number of parts, from an earlier run or from elsewhere, has other names. It is
// not replaced, and it is not in the way.
void ConversionPlanner::note_other_parts(std::size_t parts) {
  const std::string folder = out_.substr(0, out_.rfind('/') + 1), stem = part_stem();
  std::vector<std::string> names, others;
  list_folder(folder.empty() ? "." : folder, names);
  for (const std::string& name : names) {
    std::size_t part = 0, count = 0;
    if (name.starts_with(stem) &&
        std::sscanf(name.c_str() + stem.size(), "-%5zu-of-%5zu", &part, &count) == 2 &&
        count != parts && part > 0 && name == part_name(part - 1, count))
      others.push_back(name);
  }
  if (others.empty()) return;
  note("kept: " + others[0] +
       (others.size() == 1 ? "" : " and " + std::to_string(others.size() - 1) + " more") +
       ", of a set with another number of parts; remove them if they are not wanted");
}

// For each part, the tensor after its last one. Parts are cut as in llama-gguf-split: by the padded
// bytes of tensors, or by their number. A part has at least one tensor, however large.
std::vector<std::size_t> ConversionPlanner::part_ends() {
  const auto& tensors = conversion_.tensors_;
  std::vector<std::size_t> ends;
  std::size_t begin = 0, larger = 0;
  std::string first;
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::uint64_t padded =
        (tensors[i].bytes + kGgufAlignment - 1) / kGgufAlignment * kGgufAlignment;
    const bool full = (options_.split_bytes > 0 && bytes + padded > options_.split_bytes) ||
                      (options_.split_tensors > 0 && i - begin == options_.split_tensors);
    if (full && i > begin) {
      ends.push_back(i);
      begin = i;
      bytes = 0;
    }
    bytes += padded;
    if (options_.split_bytes > 0 && padded > options_.split_bytes && larger++ == 0)
      first = tensors[i].recipe.name;
  }
  ends.push_back(tensors.size());
  if (larger > 0)
    note("@{split_max_size}: " + first +
         (larger == 1 ? " alone is larger, and is a part"
                      : " and " + std::to_string(larger - 1) +
                            " more are larger, and each is a part of its own"));
  return ends;
}

std::string ConversionPlanner::model_name() const {
  std::string path = source_.path();
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path.substr(path.rfind('/') + 1);
}

// The mix's, or that of most of the matrices' bytes.
std::uint32_t ConversionPlanner::file_type() const {
  if (options_.mix != nullptr) return options_.mix->file_type;
  std::map<GgmlType, std::uint64_t> bytes;
  for (const OutputTensor& tensor : conversion_.tensors_)
    if (const auto type = ggml_type_of(tensor.to); type && tensor.recipe.shape.rank >= 2)
      bytes[*type] += tensor.bytes;
  const auto most = std::max_element(
      bytes.begin(), bytes.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  if (most != bytes.end())
    for (const WrittenType& type : kWritten)
      if (type.type == most->first) return type.file_type;
  // Blocks of a type that is only read were moved as they are: what the source calls itself.
  if (source_.gguf() != nullptr)
    if (const auto own = source_.gguf()->integer("general.file_type"); own && *own >= 0)
      return static_cast<std::uint32_t>(*own);
  return 0;
}

Status ConversionPlanner::lay_out_folder() {
  if (conversion_.tensors_.empty())
    return refuse("no tensors, expected at least one: a folder without any cannot be read");
  std::vector<SafetensorsSpec> specs;
  const bool mlx = options_.format == ModelFormat::mlx;
  for (OutputTensor& tensor : conversion_.tensors_) {
    tensor.part = specs.size();
    SafetensorsSpec spec{.name = tensor.recipe.name, .dtype = tensor.to.dtype, .shape = {}};
    for (int d = 0; d < tensor.recipe.shape.rank; ++d)
      spec.shape.push_back(static_cast<std::uint64_t>(tensor.recipe.shape[d]));
    if (tensor.to.kind != Storage::Kind::affine) {
      specs.push_back(std::move(spec));
      continue;
    }
    const auto bits = static_cast<std::uint64_t>(tensor.to.bits);
    const std::uint64_t columns = spec.shape.back(),
                        groups = columns / static_cast<std::uint64_t>(tensor.to.group);
    const std::string module = module_of(tensor.recipe.name);
    const auto add = [&](const char* part, SafeDType dtype, std::vector<std::uint64_t> shape) {
      specs.push_back({.name = module + part, .dtype = dtype, .shape = std::move(shape)});
    };
    std::vector<std::uint64_t> words = spec.shape, params = spec.shape;
    words.back() = (columns * bits + 31) / 32;
    params.back() = groups;
    if (tensor.to.zeros == Storage::Zeros::packed) {
      add(".weight_packed", SafeDType::i32, words);
      add(".weight_scale", tensor.to.dtype, params);
      add(".weight_zero_point", SafeDType::i32, {(spec.shape[0] * bits + 31) / 32, groups});
      add(".weight_shape", SafeDType::i64, {2});
    } else {
      add(".weight", SafeDType::u32, words);
      add(".scales", tensor.to.dtype, params);
      add(".biases", tensor.to.dtype, params);
    }
  }
  auto layout = lay_out_safetensors(out_, specs, kShardBytes, {{"format", mlx ? "mlx" : "pt"}});
  if (!layout) return layout.status();
  conversion_.layout_ = std::move(*layout);
  const bool codes = std::any_of(
      conversion_.tensors_.begin(), conversion_.tensors_.end(),
      [](const OutputTensor& tensor) { return tensor.to.kind == Storage::Kind::affine; });
  if (written_config_.is_null() && codes) {
    // Bits and groups are told nowhere else.
    written_config_ = Json::object();
    note("the source has no config.json: that of the output tells the quantisation alone");
  }
  if (!written_config_.is_null()) {
    Json config = written_config_;
    config.erase("quantization");
    config.erase("quantization_config");
    if (mlx) BITTERN_TRY(write_quantization(config));
    if (options_.format == ModelFormat::compressed_tensors) write_compression(config);
    const std::string text = config.dump(4) + "\n";
    // What is written must be within the limits of what is read.
    const auto read = parse_json_tree(out_ + "/config.json", std::as_bytes(std::span(text)));
    throw_if_out_of_memory(read.status());
    if (!read)
      return invalid(std::string(read.status().message()) +
                     "; @{bits} without rules needs no entry for each tensor");
    conversion_.texts_.push_back({"config.json", text});
  }
  if (source_.gguf() != nullptr) {
    auto files = tokenizer_from_gguf(*source_.gguf());
    if (!files) return of_source(files.status());
    for (TextFile& file : general_from_gguf(*source_.gguf(), conversion_.notes_))
      files->push_back(std::move(file));
    for (TextFile& file : *files)
      conversion_.texts_.push_back({std::move(file.name), std::move(file.text)});
  } else {
    for (const std::string& left_out : source_.left_out()) note("not copied: " + left_out);
    for (const std::string& name : source_.other_files()) {
      // The index and the journal list the output's files, one a line.
      const auto is_control = [](unsigned char c) { return c < 32 || c == 127; };
      if (!is_utf8(name) || std::any_of(name.begin(), name.end(), is_control)) {
        note("not copied: " + in_quotes(name) + ": a name that is not plain UTF-8");
        continue;
      }
      auto text = read_text(source_.path() + "/" + name);
      if (!text) return text.status();
      conversion_.texts_.push_back({name, std::move(*text)});
    }
  }
  // The index comes last, as it lists all files: --force replaces a folder that has these and no
  // other.
  constexpr const char* kIndex = "model.safetensors.index.json";
  std::uint64_t total = 0;
  for (const OutputLayout::Extent& extent : conversion_.layout_.tensors) total += extent.bytes;
  Json files = Json::array({kIndex});
  for (const OutputLayout::File& file : conversion_.layout_.files) files.push_back(file.name);
  for (const OutputText& text : conversion_.texts_) files.push_back(text.name);
  const std::string metadata[] = {
      "\"total_size\": " + std::to_string(total),
      "\"total_parameters\": " + std::to_string(conversion_.weights()),
      std::string("\"written_by\": \"") + kWrittenBy + "\"",
      "\"files\": " + files.dump(-1, ' ', false, Json::error_handler_t::replace)};
  auto index = safetensors_index(out_, specs, conversion_.layout_, metadata);
  if (!index) return index.status();
  conversion_.texts_.push_back({kIndex, std::move(*index)});
  return {};
}

// Words that the source does not say are packed would be taken for codes beside those that are.
Status ConversionPlanner::check_packed() const {
  std::set<std::string_view> names;
  for (const OutputTensor& tensor : conversion_.tensors_) names.insert(tensor.recipe.name);
  for (const OutputTensor& tensor : conversion_.tensors_) {
    const std::string& name = tensor.recipe.name;
    if (tensor.to != Storage::plain(SafeDType::u32) || !name.ends_with(".weight")) continue;
    for (const char* part : {".scales", ".biases"})
      if (names.contains(module_of(name) + part))
        return refuse("tensor " + name + ": U32 beside " + module_of(name) + part +
                      ", as MLX packs codes, and no quantization in config.json; expected the "
                      "config.json that tells its bits and groups");
  }
  return {};
}

// As the compressed-tensors package reads it: a group of settings for all linear layers, groups for
// those that differ, by their names, and the layers that are plain.
void ConversionPlanner::write_compression(Json& config) const {
  const SettingWeights weights = weights_by_setting(conversion_.tensors_);
  if (weights.empty()) return;
  std::map<Setting, Json> modules;
  Json ignore = Json::array({"lm_head"});
  for (const OutputTensor& tensor : conversion_.tensors_) {
    const Recipe& recipe = tensor.recipe;
    const std::string module = module_of(recipe.name);
    if (tensor.to.kind == Storage::Kind::affine) {
      const Setting setting(tensor.to.bits, tensor.to.group);
      modules.try_emplace(setting, Json::array()).first->second.push_back(module);
      if (is_output(recipe)) ignore.erase(0);
    } else if (is_matrix(recipe) && recipe.shape.rank == 2 && !is_output(recipe) &&
               (not_compressed(recipe) == nullptr || is_of_experts(recipe))) {
      ignore.push_back(module);
    }
  }
  const Setting most = most_used(weights);
  modules[most] = Json::array({"Linear"});
  Json groups = Json::object();
  const auto add = [&](const Setting& setting) {
    groups["group_" + std::to_string(groups.size())] = {{"targets", modules[setting]},
                                                        {"weights",
                                                         {{"num_bits", setting.first},
                                                          {"type", "int"},
                                                          {"symmetric", false},
                                                          {"strategy", "group"},
                                                          {"group_size", setting.second},
                                                          {"dynamic", false}}},
                                                        {"input_activations", nullptr},
                                                        {"output_activations", nullptr},
                                                        {"format", "pack-quantized"}};
  };
  add(most);
  for (const auto& [setting, count] : weights)
    if (setting != most) add(setting);
  config["quantization_config"] = {{"quant_method", "compressed-tensors"},
                                   {"format", "pack-quantized"},
                                   {"quantization_status", "compressed"},
                                   {"config_groups", groups},
                                   {"ignore", ignore},
                                   {"kv_cache_scheme", nullptr},
                                   {"global_compression_ratio", nullptr}};
}

// Both keys mlx-lm writes: the choice most tensors have, and those that differ by their module.
Status ConversionPlanner::write_quantization(Json& config) const {
  const SettingWeights weights = weights_by_setting(conversion_.tensors_);
  if (weights.empty()) return {};
  BITTERN_TRY(check_packed());
  const auto [bits, group] = most_used(weights);
  Json quantization = {{"group_size", group}, {"bits", bits}, {"mode", "affine"}};
  for (const OutputTensor& tensor : conversion_.tensors_) {
    if (tensor.to.kind != Storage::Kind::affine ||
        (tensor.to.bits == bits && tensor.to.group == group))
      continue;
    if (hides_a_key(tensor.recipe.name))
      return refuse("tensor " + tensor.recipe.name + ": MLX's config.json has no place for the " +
                    "bits of a module of this name, expected a rule that keeps the tensor");
    // Not operator[], which would look through all keys for each.
    quantization.get_ref<Json::object_t&>().emplace_back(
        module_of(tensor.recipe.name),
        Json{{"group_size", tensor.to.group}, {"bits", tensor.to.bits}, {"mode", "affine"}});
  }
  config["quantization"] = quantization;
  config["quantization_config"] = quantization;
  return {};
}

}  // namespace bittern
