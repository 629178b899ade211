#include "convert/conversion.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <utility>

#include "convert/architecture.h"
#include "convert/importance.h"
#include "convert/rows.h"
#include "convert/tokenizer.h"
#include "formats/fingerprint.h"

namespace bittern {

const char* name(ModelFormat format) {
  constexpr const char* kNames[] = {"mlx", "gguf", "safetensors"};
  return kNames[static_cast<int>(format)];
}

namespace {

using Json = nlohmann::ordered_json;

constexpr int kBits[] = {2, 3, 4, 5, 6, 8};
constexpr int kGroups[] = {32, 64, 128};
constexpr std::uint64_t kShardBytes = std::uint64_t{5} << 30;  // as mlx-lm cuts

struct TypeName {
  GgmlType type;
  std::uint32_t file_type;  // general.file_type of a file whose matrices are of it
};
// What can be written, least bits first, and what llama.cpp calls such a file.
constexpr TypeName kWritten[] = {{GgmlType::q4_0, 2},  {GgmlType::q4_k, 14}, {GgmlType::q4_1, 3},
                                 {GgmlType::q5_0, 8},  {GgmlType::q5_k, 16}, {GgmlType::q5_1, 9},
                                 {GgmlType::q6_k, 18}, {GgmlType::q8_0, 7},  {GgmlType::f16, 1},
                                 {GgmlType::bf16, 32}, {GgmlType::f32, 0}};

bool is_written(GgmlType type) {
  return std::any_of(std::begin(kWritten), std::end(kWritten),
                     [&](const TypeName& t) { return t.type == type; });
}

std::string written_names() {
  std::string names;
  for (const TypeName& t : kWritten) names += std::string(" ") + info(t.type).name;
  return names;
}

World world_of(ModelFormat format) {
  return format == ModelFormat::gguf  ? World::gguf
         : format == ModelFormat::mlx ? World::mlx
                                      : World::hf;
}

bool has(std::string_view name, std::string_view part) { return name.find(part) != name.npos; }

// What is small and delicate, and stays as it is unless told otherwise: norms, convolutions,
// routers, and the gates of gated-delta layers.
const char* delicate(std::string_view name) {
  for (const std::string_view part : {"norm", "conv1d", "A_log", "ssm_a", "dt_bias", "ssm_dt"})
    if (has(name, part)) return "delicate";
  for (const std::string_view part : {"mlp.gate.weight", "ffn_gate_inp", "shared_expert_gate"})
    if (has(name, part)) return "router";
  for (const std::string_view part :
       {"in_proj_a.", "in_proj_b.", "in_proj_ba.", "ssm_alpha", "ssm_beta", "ssm_ba"})
    if (has(name, part)) return "gate of a gated-delta layer";
  return nullptr;
}

bool is_matrix(const Recipe& recipe) {
  constexpr std::string_view kSuffix = ".weight";
  return recipe.shape.rank >= 2 && recipe.map == ValueMap::same &&
         recipe.name.size() > kSuffix.size() && recipe.name.ends_with(kSuffix);
}

bool is_embedding_or_head(std::string_view name) {
  return has(name, "embed_tokens") || has(name, "token_embd") || has(name, "lm_head") ||
         name == "output.weight" || has(name, "word_embeddings");
}

// What messages call it: the source's name, as the user knows it.
const std::string& source_of(const Recipe& recipe) {
  return recipe.sources.empty() ? recipe.name : recipe.sources[0];
}

std::int64_t columns_of(const Shape& shape) { return shape.rank == 0 ? 1 : shape[shape.rank - 1]; }

std::string short_number(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", x);
  return text;
}

std::string module_of(const std::string& name) { return name.substr(0, name.rfind('.')); }

Result<std::string> read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (!file || !(text << file.rdbuf())) return Status{Code::io_error, path + ": cannot read"};
  return std::move(text).str();
}

}  // namespace

// ---- policy files ----

Status read_policy(const std::string& path, ConversionOptions& options) {
  auto file = MappedFile::open(path);
  if (!file) return file.status();
  const auto bytes = file->bytes();
  if (bytes.size() > (std::size_t{4} << 20))
    return invalid(path + ": " + std::to_string(bytes.size()) +
                   " bytes, expected a policy of at most 4 MiB");
  const auto* text = reinterpret_cast<const char*>(bytes.data());
  const Json policy = Json::parse(text, text + bytes.size(), nullptr, false);
  const auto refuse = [&](const std::string& what) { return invalid(path + ": " + what); };
  if (!policy.is_object()) return refuse("not a JSON object, expected one");
  const auto number = [&](const Json& in, const char* key, int& to) -> Status {
    const auto found = in.find(key);
    if (found == in.end()) return {};
    if (!found->is_number_integer() || found->get<std::int64_t>() < 1 ||
        found->get<std::int64_t>() > 1024)
      return refuse(std::string(key) + ": " + found->dump() + ", expected an integer in 1..1024");
    if (to == 0) to = found->get<int>();
    return {};
  };
  const auto type = [&](const Json& in, std::optional<GgmlType>& to) -> Status {
    const auto found = in.find("type");
    if (found == in.end()) return {};
    const GgmlTypeInfo* known =
        found->is_string() ? ggml_type(std::string_view(found->get_ref<const std::string&>()))
                           : nullptr;
    if (known == nullptr || !is_written(known->type))
      return refuse("type: " + found->dump() + ", expected one of" + written_names());
    if (!to) to = known->type;
    return {};
  };
  for (const auto& [key, value] : policy.items()) {
    if (key != "bits" && key != "group_size" && key != "type" && key != "rules")
      return refuse(key + ": unknown, expected bits, group_size, type or rules");
  }
  BITTERN_TRY(number(policy, "bits", options.bits));
  BITTERN_TRY(number(policy, "group_size", options.group));
  BITTERN_TRY(type(policy, options.type));
  const auto rules = policy.find("rules");
  if (rules == policy.end()) return {};
  if (!rules->is_array()) return refuse("rules: expected a list of objects");
  for (const Json& line : *rules) {
    if (!line.is_object() || !line.contains("match") || !line["match"].is_string())
      return refuse("rules: " + line.dump() +
                    ", expected an object with \"match\", a regular expression");
    TensorRule rule{.pattern = line["match"].get<std::string>()};
    for (const auto& [key, value] : line.items()) {
      if (key == "keep" && value.is_boolean()) {
        rule.keep = value.get<bool>();
      } else if (key != "match" && key != "bits" && key != "group_size" && key != "type") {
        return refuse("rules: " + rule.pattern + ": " + key + ": " + value.dump() +
                      ", expected match, bits, group_size, type or keep");
      }
    }
    BITTERN_TRY(number(line, "bits", rule.bits));
    BITTERN_TRY(number(line, "group_size", rule.group));
    BITTERN_TRY(type(line, rule.type));
    options.rules.push_back(std::move(rule));
  }
  return {};
}

// ---- the plan ----

class ConversionPlanner {
 public:
  ConversionPlanner(const Checkpoint& source, const ConversionOptions& options,
                    const std::string& out, const ProgressFunction& progress)
      : source_(source), options_(options), out_(out), progress_(progress) {}

  Result<Conversion> make() {
    conversion_.source_ = &source_;
    BITTERN_TRY(check_options());
    BITTERN_TRY(compile_rules());
    BITTERN_TRY(make_recipes());
    if (!options_.imatrix.empty()) BITTERN_TRY(read_importance());
    for (OutputTensor& tensor : conversion_.tensors_) BITTERN_TRY(decide(tensor));
    if (options_.target_bpw > 0) BITTERN_TRY(meet_target());
    for (OutputTensor& tensor : conversion_.tensors_) BITTERN_TRY(settle(tensor));
    BITTERN_TRY(options_.format == ModelFormat::gguf ? lay_out_gguf() : lay_out_folder());
    conversion_.options_ = options_;
    conversion_.fingerprint_ = fingerprint();
    return std::move(conversion_);
  }

 private:
  Status refuse(const std::string& what) const { return invalid(source_.path() + ": " + what); }
  // What knows of names and configs does not know whose they are.
  Status of_source(const Status& status) const {
    const std::string message(status.message());
    if (message.starts_with(source_.path())) return status;
    return {status.code(), source_.path() + ": " + message};
  }
  void note(std::string text) { conversion_.notes_.push_back(std::move(text)); }

  // ---- what was asked for ----

  Status check_options() {
    const bool gguf = options_.format == ModelFormat::gguf;
    const int ways = options_.transcode + options_.dequantize.has_value() +
                     (options_.bits > 0 || options_.type.has_value() || options_.target_bpw > 0);
    if (ways == 0)
      return invalid(
          "nothing asked for, expected --bits, --type, --target-bpw, --transcode or --dequantize");
    if (ways > 1)
      return invalid(
          "--transcode, --dequantize and --bits (or --type, --target-bpw) exclude each other, "
          "expected one");
    if (options_.type && !gguf)
      return invalid(std::string("--type ") + info(*options_.type).name + ": the format is " +
                     name(options_.format) + ", expected --format gguf");
    if (options_.type && options_.bits > 0)
      return invalid("--type and --bits both given, expected one");
    if (options_.type && !is_written(*options_.type))
      return unsupported(std::string("--type ") + info(*options_.type).name +
                         ": not written, expected one of" + written_names());
    if (options_.group == 0) options_.group = gguf ? 32 : 64;
    if (options_.bits > 0) BITTERN_TRY(check_bits(options_.bits, "--bits"));
    BITTERN_TRY(check_group(options_.group, "--group-size"));
    for (const TensorRule& rule : options_.rules) {
      if (rule.bits > 0) BITTERN_TRY(check_bits(rule.bits, rule.pattern));
      if (rule.group > 0) BITTERN_TRY(check_group(rule.group, rule.pattern));
      if (rule.type && !gguf)
        return invalid(rule.pattern + ": type " + info(*rule.type).name + " in format " +
                       name(options_.format) + ", expected --format gguf");
      if (rule.type && !is_written(*rule.type))
        return unsupported(rule.pattern + ": type " + info(*rule.type).name +
                           ": not written, expected one of" + written_names());
    }
    if (options_.scale_dtype && gguf)
      return invalid("--scale-dtype: scales of GGUF are f16, expected --format mlx");
    if (!options_.imatrix.empty() && options_.method != AffineMethod::lsq && !gguf &&
        options_.method)
      return invalid("--imatrix: only --method lsq weighs errors, expected that");
    return {};
  }

  Status check_bits(int bits, const std::string& where) const {
    if (std::find(std::begin(kBits), std::end(kBits), bits) == std::end(kBits))
      return invalid(where + ": " + std::to_string(bits) + " bits, expected 2, 3, 4, 5, 6 or 8");
    if (options_.format == ModelFormat::gguf && bits < 4)
      return unsupported(
          where + ": " + std::to_string(bits) +
          " bits: GGUF files are written with 4, 5, 6 or 8; expected these or --format mlx");
    return {};
  }
  Status check_group(int group, const std::string& where) const {
    const bool gguf = options_.format == ModelFormat::gguf;
    if (gguf && group != 32)
      return invalid(where + ": groups of " + std::to_string(group) +
                     ": GGUF's types written here have 32 (Q6_K 16), expected 32");
    if (std::find(std::begin(kGroups), std::end(kGroups), group) == std::end(kGroups))
      return invalid(where + ": groups of " + std::to_string(group) + ", expected 32, 64 or 128");
    return {};
  }

  Status compile_rules() {
    for (const TensorRule& rule : options_.rules) {
      try {
        patterns_.emplace_back(rule.pattern, std::regex::ECMAScript | std::regex::optimize);
      } catch (const std::regex_error& error) {
        return invalid(rule.pattern + ": not a regular expression (" + error.what() +
                       "), expected one");
      }
    }
    return {};
  }

  const TensorRule* rule_for(const Recipe& recipe) const {
    for (std::size_t i = 0; i < patterns_.size(); ++i) {
      if (std::regex_search(recipe.name, patterns_[i])) return &options_.rules[i];
      for (const std::string& source : recipe.sources)
        if (std::regex_search(source, patterns_[i])) return &options_.rules[i];
    }
    return nullptr;
  }

  // ---- names ----

  Status make_recipes() {
    for (const CheckpointTensor& tensor : source_.tensors())
      shapes_.push_back({tensor.name, tensor.shape});
    from_ = source_.gguf() != nullptr ? World::gguf : world_of_folder(shapes_);
    const World to = world_of(options_.format);
    config_ = source_.config();
    if (source_.gguf() != nullptr && to != World::gguf) {
      auto config = config_from_gguf(*source_.gguf(), float_name(folder_dtype()));
      if (!config) return of_source(config.status());
      config_ = std::move(*config);
    }
    bool renames = from_ != to;
    if (from_ != World::gguf && to != World::gguf && renames) {
      // Folders may keep names nobody knows; a GGUF file may not.
      if (const Status known = known_architecture(config_); !known.ok()) {
        renames = false;
        note("names and shapes are kept: " + std::string(known.message()));
      }
    }
    if (!renames) {
      written_config_ = config_;
      for (const NamedShape& tensor : shapes_)
        conversion_.tensors_.push_back(
            {.recipe = {.name = tensor.name, .shape = tensor.shape, .sources = {tensor.name}}});
      return {};
    }
    auto renaming = rename_tensors(config_, shapes_, from_, to);
    if (!renaming) return of_source(renaming.status());
    if (to != World::gguf) {
      auto config = config_for(to, config_);
      if (!config) return of_source(config.status());
      written_config_ = std::move(*config);
    }
    for (Recipe& recipe : renaming->tensors)
      conversion_.tensors_.push_back({.recipe = std::move(recipe)});
    for (std::string& text : renaming->notes) note(std::move(text));
    for (const std::string& name : renaming->left_out)
      note("left out, as " + std::string(name_of(to)) + " has no place for it: " + name);
    return {};
  }

  static const char* name_of(World world) {
    return world == World::gguf ? "GGUF" : world == World::mlx ? "MLX" : "Hugging Face's layout";
  }

  // The dtype plain weights have, or, of a quantised model, are given.
  SafeDType folder_dtype() const {
    if (options_.dequantize) return *options_.dequantize;
    if (options_.scale_dtype) return *options_.scale_dtype;
    if (options_.transcode) return SafeDType::f32;
    std::map<SafeDType, std::uint64_t> bytes;
    for (const CheckpointTensor& tensor : source_.tensors()) {
      if (tensor.storage.kind == Storage::Kind::plain && is_float(tensor.storage.dtype) &&
          tensor.shape.rank >= 2)
        bytes[tensor.storage.dtype] += tensor.bytes();
      if (tensor.storage.kind == Storage::Kind::affine)
        bytes[tensor.storage.dtype] += tensor.bytes();
      if (tensor.storage.kind == Storage::Kind::blocks) bytes[SafeDType::f16] += tensor.bytes();
    }
    const auto most =
        std::max_element(bytes.begin(), bytes.end(),
                         [](const auto& a, const auto& b) { return a.second < b.second; });
    return most == bytes.end() ? SafeDType::f32 : most->first;
  }
  static const char* float_name(SafeDType dtype) {
    return dtype == SafeDType::f16 ? "float16" : dtype == SafeDType::bf16 ? "bfloat16" : "float32";
  }

  Status read_importance() {
    auto importance = ImportanceMatrix::open(options_.imatrix);
    if (!importance) return importance.status();
    // The matrix has GGUF's names: those of the source's tensors, by the tensors made of them.
    std::map<std::string, std::string> gguf_name;
    if (source_.gguf() == nullptr) {
      auto renaming = rename_tensors(config_, shapes_, from_, World::gguf);
      if (!renaming) return of_source(renaming.status());
      for (const Recipe& recipe : renaming->tensors)
        for (const std::string& from : recipe.sources) gguf_name.emplace(from, recipe.name);
    }
    conversion_.importance_.resize(conversion_.tensors_.size());
    std::size_t found = 0;
    for (std::size_t i = 0; i < conversion_.tensors_.size(); ++i) {
      const Recipe& recipe = conversion_.tensors_[i].recipe;
      if (!is_matrix(recipe) || !recipe.columns.empty()) continue;
      const std::string& from = source_of(recipe);
      const std::string name = source_.gguf() != nullptr ? from : gguf_name[from];
      const std::int64_t matrices = recipe.shape.rank >= 3 ? recipe.shape[0] : 1;
      auto weights = importance->find(name, columns_of(recipe.shape), matrices);
      if (!weights) return weights.status();
      found += !weights->empty();
      conversion_.importance_[i] = std::move(*weights);
    }
    if (found == 0)
      return invalid(options_.imatrix + ": no entry for any tensor of " + source_.path() +
                     ", expected its importance matrix");
    note("importance of " + std::to_string(found) + " tensors from " + options_.imatrix);
    return {};
  }

  // ---- what becomes of a tensor ----

  static GgmlType type_of_bits(int bits) {
    return bits == 4   ? GgmlType::q4_k
           : bits == 5 ? GgmlType::q5_k
           : bits == 6 ? GgmlType::q6_k
                       : GgmlType::q8_0;
  }

  // As llama.cpp falls back where rows are no multiple of a type's block.
  static GgmlType fitting(GgmlType type, std::int64_t columns) {
    if (columns % info(type).block == 0) return type;
    if (info(type).block == 256) {
      type = type == GgmlType::q4_k   ? GgmlType::q5_0
             : type == GgmlType::q5_k ? GgmlType::q5_1
                                      : GgmlType::q8_0;
      if (columns % 32 == 0) return type;
    }
    return GgmlType::f16;
  }

  Status decide(OutputTensor& tensor) {
    const Recipe& recipe = tensor.recipe;
    auto reader = RowReader::open(source_, recipe);
    if (!reader) return reader.status();
    tensor.from = reader->storage();
    tensor.to = kept(tensor);
    const bool arithmetic = tensor.from.quantized() || is_float(tensor.from.dtype) ||
                            tensor.from.dtype == SafeDType::f64;
    if (!arithmetic) {
      tensor.note = std::string(bittern::name(tensor.from.dtype)) + ": left as it is";
      return {};
    }
    if (options_.dequantize) {
      // llama.cpp wants vectors in f32 whatever the matrices are.
      const bool vector =
          options_.format == ModelFormat::gguf && (recipe.shape.rank < 2 || delicate(recipe.name));
      tensor.to = Storage::plain(vector ? SafeDType::f32 : *options_.dequantize);
      return {};
    }
    if (options_.transcode) return decide_transcode(tensor, *reader);

    const TensorRule* rule = rule_for(recipe);
    if (!is_matrix(recipe) || (rule != nullptr && rule->keep)) {
      if (rule != nullptr && rule->keep) tensor.note = "kept by " + rule->pattern;
      return {};
    }
    if (rule == nullptr && !options_.pure) {
      if (const char* why = delicate(recipe.name)) {
        tensor.note = std::string(why) + ": left as it is";
        return {};
      }
    }
    const std::int64_t columns = columns_of(recipe.shape);
    Storage wanted;
    if (options_.format == ModelFormat::gguf) {
      GgmlType type = options_.type.value_or(type_of_bits(options_.bits > 0 ? options_.bits : 4));
      if (rule != nullptr && rule->bits > 0) type = type_of_bits(rule->bits);
      if (rule != nullptr && rule->type) type = *rule->type;
      const GgmlType fits = fitting(type, columns);
      if (fits != type) {
        tensor.note = "rows of " + std::to_string(columns) + " are no multiple of " +
                      std::to_string(info(type).block) + ": " + info(fits).name + " in place of " +
                      info(type).name;
      }
      wanted = storage_of(fits);
    } else {
      const int bits = rule != nullptr && rule->bits > 0 ? rule->bits
                       : options_.bits > 0               ? options_.bits
                                                         : 4;
      const int group = rule != nullptr && rule->group > 0 ? rule->group : options_.group;
      if (columns % group != 0) {
        tensor.note = "rows of " + std::to_string(columns) + " are no multiple of " +
                      std::to_string(group) + ": left as it is";
        return {};
      }
      wanted = Storage::affine(bits, group, scale_dtype(tensor.from));
    }
    if (tensor.from.quantized() && tensor.from != wanted && !options_.allow_requantize) {
      return refuse("tensor " + source_of(recipe) + " is quantised already (" + tensor.from.str() +
                    "), expected plain numbers; --transcode keeps them exact, --dequantize writes "
                    "them plain, "
                    "--allow-requantize quantises once more");
    }
    tensor.to = wanted;
    tensor.way = OutputTensor::Way::quantize;
    if (options_.target_bpw > 0 && rule == nullptr) adjustable_.push_back(&tensor);
    return {};
  }

  // How a tensor stays, in the format asked for: its storage, where that has it.
  Storage kept(const OutputTensor& tensor) const {
    const Storage& from = tensor.from;
    if (options_.format == ModelFormat::gguf) {
      const bool vector = tensor.recipe.shape.rank < 2 || delicate(tensor.recipe.name);
      if (from.kind == Storage::Kind::plain && is_float(from.dtype))
        return vector ? Storage::plain(SafeDType::f32) : from;
      if (from.kind == Storage::Kind::affine) return Storage::plain(SafeDType::f32);
      return from;
    }
    if (from.kind == Storage::Kind::blocks) return Storage::plain(SafeDType::f32);
    if (from.kind == Storage::Kind::affine && options_.format == ModelFormat::safetensors)
      return Storage::plain(from.dtype);
    return from;
  }

  SafeDType scale_dtype(const Storage& from) const {
    if (options_.scale_dtype) return *options_.scale_dtype;
    if (from.kind == Storage::Kind::blocks) return SafeDType::f16;
    return is_float(from.dtype) ? from.dtype : SafeDType::f32;
  }

  Status decide_transcode(OutputTensor& tensor, const RowReader& reader) {
    if (!tensor.from.quantized()) return {};
    const auto grid = grid_of(tensor.from);
    const Recipe& recipe = tensor.recipe;
    const std::int64_t columns = columns_of(recipe.shape);
    if (options_.format == ModelFormat::safetensors)
      return invalid(
          "--transcode: a folder of plain safetensors has no codes, expected --format mlx or gguf "
          "(or --dequantize f32)");
    if (!grid) {
      if (options_.format == ModelFormat::gguf && tensor.from.kind == Storage::Kind::blocks)
        return {};  // moved as it is
      if (!options_.lossy) {
        return unsupported(source_.path() + ": tensor " + source_of(recipe) + ": " +
                           tensor.from.str() +
                           " has groups of 16, which MLX has not, expected --lossy (numbers "
                           "change) or --dequantize");
      }
      const int bits = tensor.from.kind == Storage::Kind::affine ? tensor.from.bits
                       : tensor.from.type == GgmlType::q2_k      ? 3
                       : tensor.from.type == GgmlType::q3_k      ? 4
                                                                 : 8;
      tensor.to = Storage::affine(bits, 32, options_.scale_dtype.value_or(SafeDType::f32));
      tensor.way = OutputTensor::Way::quantize;
      tensor.note = "not exact: " + tensor.from.str() + " quantised again to " +
                    std::to_string(bits) + " bits";
      return {};
    }
    if (options_.format == ModelFormat::mlx) {
      if (tensor.from.kind == Storage::Kind::affine && reader.movable() && !options_.scale_dtype)
        return {};
      tensor.to = Storage::affine(grid->bits, std::min(grid->group, 128),
                                  options_.scale_dtype.value_or(SafeDType::f32));
      tensor.way = OutputTensor::Way::transcode;
      return {};
    }
    if (tensor.from.kind == Storage::Kind::blocks && reader.movable()) return {};
    // The smallest type that holds every number: a trial over all rows.
    std::string why;
    for (const TypeName& type : kWritten) {
      const GgmlType t = options_.type.value_or(type.type);
      if (storage_of(t).kind != Storage::Kind::blocks || columns % info(t).block != 0) continue;
      const Status fits = try_transcode(reader, storage_of(t));
      if (fits.ok()) {
        tensor.to = storage_of(t);
        tensor.way = OutputTensor::Way::transcode;
        return {};
      }
      if (fits.code() != Code::unsupported) return fits;
      why = std::string(fits.message());
      if (options_.type) break;
    }
    return unsupported(source_.path() + ": tensor " + source_of(recipe) +
                       ": no type of GGUF holds its numbers exactly (" + why +
                       "), expected --dequantize, or --allow-requantize with --type");
  }

  static Status try_transcode(const RowReader& reader, const Storage& to) {
    struct Worker {
      GridRows grid;
      EncodedRows encoded;
    };
    const std::int64_t length = rows_at_once(reader.columns());
    std::vector<Worker> workers;
    return for_runs((reader.rows() + length - 1) / length, workers,
                    [&](std::int64_t i, Worker& worker) -> Status {
                      const std::int64_t row = i * length;
                      const std::int64_t count = std::min(length, reader.rows() - row);
                      BITTERN_TRY(reader.grid(row, count, worker.grid));
                      return encode_grid(worker.grid, reader.columns(), to, worker.encoded);
                    });
  }

  // Way and size, once the storage is settled.
  Status settle(OutputTensor& tensor) {
    using Way = OutputTensor::Way;
    auto reader = RowReader::open(source_, tensor.recipe);
    if (!reader) return reader.status();
    if (tensor.way != Way::transcode) {
      const bool same = tensor.to == tensor.from && reader->movable();
      tensor.way = same ? Way::copy : tensor.to.quantized() ? Way::quantize : Way::cast;
    }
    // Quantised, then written as plain numbers.
    if (options_.format == ModelFormat::safetensors && tensor.to.kind == Storage::Kind::affine &&
        tensor.way == Way::quantize) {
      tensor.through = tensor.to;
      tensor.to = Storage::plain(tensor.to.dtype);
    }
    if (options_.method && tensor.way == Way::quantize && tensor.to.kind == Storage::Kind::blocks) {
      constexpr GgmlType kGiven[] = {GgmlType::q4_1, GgmlType::q5_1, GgmlType::q4_k,
                                     GgmlType::q5_k};
      if (std::find(std::begin(kGiven), std::end(kGiven), tensor.to.type) == std::end(kGiven))
        tensor.note += std::string(tensor.note.empty() ? "" : "; ") + "by " +
                       info(tensor.to.type).name + "'s own rule: it has no bias to fit";
    }
    if (tensor.way == Way::cast && tensor.from.quantized() && !options_.dequantize &&
        !options_.allow_requantize)
      tensor.note = tensor.note.empty() ? "quantised, written as " + tensor.to.str() : tensor.note;
    auto bytes = tensor.to.bytes(tensor.recipe.shape);
    if (!bytes)
      return refuse("tensor " + tensor.recipe.name + ": " + std::string(bytes.status().message()));
    tensor.bytes = *bytes;
    return {};
  }

  // ---- bits by measured error ----

  Status meet_target();

  // ---- files ----

  Status lay_out_gguf() {
    GgufWriter writer(out_);
    const auto add = [&](const std::string& key, const GgufData& value) {
      return writer.add(key, value);
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
      auto metadata = metadata_from_config(config_, shapes_, model_name());
      if (!metadata) return of_source(metadata.status());
      for (const auto& [key, value] : *metadata) BITTERN_TRY(add(key, value));
      std::int64_t vocabulary = 0;
      for (const OutputTensor& tensor : conversion_.tensors_)
        if (tensor.recipe.name == "token_embd.weight") vocabulary = tensor.recipe.shape[0];
      auto tokenizer = tokenizer_to_gguf(source_.path(), vocabulary);
      if (!tokenizer) return of_source(tokenizer.status());
      for (const auto& [key, value] : *tokenizer) BITTERN_TRY(add(key, value));
    }
    BITTERN_TRY(add("general.quantization_version", GgufData(std::uint32_t{2})));
    BITTERN_TRY(add("general.file_type", GgufData(file_type())));
    if (!options_.imatrix.empty())
      BITTERN_TRY(add("quantize.imatrix.file",
                      GgufData(options_.imatrix.substr(options_.imatrix.rfind('/') + 1))));
    for (OutputTensor& tensor : conversion_.tensors_) {
      const auto type = ggml_type_of(tensor.to);
      if (!type)
        return unsupported(source_.path() + ": tensor " + source_of(tensor.recipe) + ": " +
                           tensor.to.str() + ": GGUF has no such type");
      tensor.part = static_cast<std::size_t>(&tensor - conversion_.tensors_.data());
      BITTERN_TRY(writer.add_tensor(tensor.recipe.name, *type, tensor.recipe.shape));
    }
    conversion_.layout_ = writer.lay_out();
    return {};
  }

  std::string model_name() const {
    std::string path = source_.path();
    while (path.size() > 1 && path.back() == '/') path.pop_back();
    return path.substr(path.rfind('/') + 1);
  }

  // Of most of the matrices' bytes.
  std::uint32_t file_type() const {
    std::map<GgmlType, std::uint64_t> bytes;
    for (const OutputTensor& tensor : conversion_.tensors_)
      if (const auto type = ggml_type_of(tensor.to); type && tensor.recipe.shape.rank >= 2)
        bytes[*type] += tensor.bytes;
    const auto most =
        std::max_element(bytes.begin(), bytes.end(),
                         [](const auto& a, const auto& b) { return a.second < b.second; });
    if (most != bytes.end())
      for (const TypeName& type : kWritten)
        if (type.type == most->first) return type.file_type;
    return 0;
  }

  Status lay_out_folder() {
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
      const std::uint64_t columns = spec.shape.back();
      spec.dtype = SafeDType::u32;
      spec.shape.back() = columns * static_cast<std::uint64_t>(tensor.to.bits) / 32;
      specs.push_back(spec);
      spec.dtype = tensor.to.dtype;
      spec.shape.back() = columns / static_cast<std::uint64_t>(tensor.to.group);
      for (const char* part : {".scales", ".biases"}) {
        spec.name = module_of(tensor.recipe.name) + part;
        specs.push_back(spec);
      }
    }
    auto layout = lay_out_safetensors(out_, specs, kShardBytes, {{"format", mlx ? "mlx" : "pt"}});
    if (!layout) return layout.status();
    conversion_.layout_ = std::move(*layout);
    std::uint64_t total = 0;
    for (const OutputLayout::Extent& extent : conversion_.layout_.tensors) total += extent.bytes;
    const std::string metadata[] = {
        "\"total_size\": " + std::to_string(total),
        "\"total_parameters\": " + std::to_string(conversion_.weights())};
    auto index = safetensors_index(out_, specs, conversion_.layout_, metadata);
    if (!index) return index.status();
    conversion_.texts_.push_back({"model.safetensors.index.json", std::move(*index)});
    if (!written_config_.is_null()) {
      Json config = written_config_;
      config.erase("quantization");
      config.erase("quantization_config");
      if (mlx) write_quantization(config);
      conversion_.texts_.push_back({"config.json", config.dump(4) + "\n"});
    }
    if (source_.gguf() != nullptr) {
      auto files = tokenizer_from_gguf(*source_.gguf());
      if (!files) return of_source(files.status());
      for (TextFile& file : *files)
        conversion_.texts_.push_back({std::move(file.name), std::move(file.text)});
    } else {
      for (const std::string& name : source_.other_files()) {
        auto text = read_text(source_.path() + "/" + name);
        if (!text) return text.status();
        conversion_.texts_.push_back({name, std::move(*text)});
      }
    }
    return {};
  }

  // Both keys mlx-lm writes: the choice most tensors have, and those that differ by their module.
  void write_quantization(Json& config) const {
    std::map<std::pair<int, int>, std::uint64_t> weights;
    for (const OutputTensor& tensor : conversion_.tensors_)
      if (tensor.to.kind == Storage::Kind::affine)
        weights[{tensor.to.bits, tensor.to.group}] +=
            static_cast<std::uint64_t>(tensor.recipe.shape.numel());
    if (weights.empty()) return;
    const auto [bits, group] =
        std::max_element(weights.begin(), weights.end(), [](const auto& a, const auto& b) {
          return a.second < b.second;
        })->first;
    Json quantization = {{"group_size", group}, {"bits", bits}, {"mode", "affine"}};
    for (const OutputTensor& tensor : conversion_.tensors_) {
      if (tensor.to.kind != Storage::Kind::affine ||
          (tensor.to.bits == bits && tensor.to.group == group))
        continue;
      quantization[module_of(tensor.recipe.name)] = {
          {"group_size", tensor.to.group}, {"bits", tensor.to.bits}, {"mode", "affine"}};
    }
    config["quantization"] = quantization;
    config["quantization_config"] = quantization;
  }

  std::uint64_t fingerprint() const {
    Fingerprint hash;
    hash.add(source_.fingerprint());
    hash.add(options_.method ? static_cast<std::uint64_t>(*options_.method) + 1 : 0);
    for (const std::vector<float>& weights : conversion_.importance_)
      hash.add(std::as_bytes(std::span(weights)));
    for (const OutputLayout::File& file : conversion_.layout_.files)
      hash.add(file.name), hash.add(file.head);
    for (const OutputTensor& tensor : conversion_.tensors_) {
      hash.add(tensor.to.str() + tensor.through.str());
      hash.add(static_cast<std::uint64_t>(tensor.way));
    }
    return hash.value();
  }

  const Checkpoint& source_;
  ConversionOptions options_;
  std::string out_;
  const ProgressFunction& progress_;
  Conversion conversion_;
  std::vector<std::regex> patterns_;
  std::vector<NamedShape> shapes_;  // of the source
  World from_ = World::hf;
  Json config_, written_config_;  // of the source, of the output
  std::vector<OutputTensor*> adjustable_;
};

// ---- bits by measured error ----

namespace {

// The layer a name tells, or -1.
int layer_of(const std::string& name) {
  for (const std::string_view before : {"layers.", "blk."}) {
    const std::size_t at = name.find(before);
    if (at == name.npos) continue;
    int layer = -1;
    const char* digits = name.data() + at + before.size();
    std::from_chars(digits, name.data() + name.size(), layer);
    return layer;
  }
  return -1;
}

// sum (w - y)^2 and sum w^2
struct Squares {
  double error = 0, size = 0;
  void operator+=(const Squares& other) { error += other.error, size += other.size; }
};
Squares squares(std::span<const float> w, std::span<const float> y) {
  constexpr std::size_t kSums = 8;  // so that additions need not wait for each other
  Squares sums[kSums];
  for (std::size_t i = 0; i < w.size(); ++i) {
    const double x = w[i], d = x - double{y[i]};
    sums[i % kSums] += {d * d, x * x};
  }
  for (std::size_t i = 1; i < kSums; ++i) sums[0] += sums[i];
  return sums[0];
}

// What each storage makes of the tensor. Runs of rows are the same for any number of threads and
// their sums are added in order, so that the sums are the same, too.
Result<std::vector<Squares>> measure(const RowReader& reader, const std::vector<Storage>& storages,
                                     std::optional<AffineMethod> method,
                                     const std::function<void(std::int64_t rows)>& progress) {
  struct Worker {
    RowNumbers numbers;
    EncodedRows encoded;
    std::vector<float> w, y;
  };
  const std::int64_t columns = reader.columns(), length = rows_at_once(columns);
  const std::int64_t runs = (reader.rows() + length - 1) / length;
  std::vector<Squares> sums(storages.size() * static_cast<std::size_t>(runs));
  const auto run = [&](std::int64_t i, Worker& worker) -> Status {
    const std::int64_t row = i * length, count = std::min(length, reader.rows() - row);
    BITTERN_TRY(reader.numbers(row, count, worker.numbers));
    worker.w.resize(static_cast<std::size_t>(count * columns));
    worker.y.resize(worker.w.size());
    BITTERN_TRY(as_f32(worker.numbers, worker.w));
    Squares* sum = sums.data() + static_cast<std::size_t>(i) * storages.size();
    for (const Storage& to : storages) {
      BITTERN_TRY((RowEncoder{.to = to, .method = method, .through = {}}.encode(
          worker.numbers, count, columns, {}, worker.encoded)));
      BITTERN_TRY(decode_rows(tensor_of(worker.encoded, to, count, columns), 0, count, worker.y));
      *sum++ = squares(worker.w, worker.y);
    }
#pragma omp critical(bittern_progress)
    progress(count);
    return {};
  };
  std::vector<Worker> workers;
  BITTERN_TRY(for_runs(runs, workers, run));
  std::vector<Squares> total(storages.size());
  for (std::size_t i = 0; i < sums.size(); ++i) total[i % storages.size()] += sums[i];
  return total;
}

}  // namespace

// Greedy: every tensor begins with the fewest bits it may have; then, again and again, the step
// that gains the most per byte is taken, while the target allows it. What a tensor loses is its
// relative squared error times its size, so that small and large weights count alike.
Status ConversionPlanner::meet_target() {
  struct Candidate {
    Storage storage;
    std::uint64_t bytes = 0;
    double loss = 0;
  };
  const auto least = static_cast<int>(std::ceil(options_.target_bpw));
  int last_layer = 0;
  for (const OutputTensor* tensor : adjustable_)
    last_layer = std::max(last_layer, layer_of(tensor->recipe.name));

  std::vector<std::vector<Candidate>> candidates(adjustable_.size());
  ConversionProgress state{.doing = "measuring", .tensor = {}, .done = 0, .all = 0};
  for (const OutputTensor* tensor : adjustable_)
    state.all += static_cast<std::uint64_t>(tensor->recipe.shape.numel());
  for (std::size_t t = 0; t < adjustable_.size(); ++t) {
    OutputTensor& tensor = *adjustable_[t];
    const int layer = layer_of(tensor.recipe.name);
    // The ends of the network are kept higher: at least the target.
    const bool end = is_embedding_or_head(tensor.recipe.name) || layer == 0 || layer == last_layer;
    const std::int64_t columns = columns_of(tensor.recipe.shape);
    for (const int bits : kBits) {
      if (end && bits < std::min(least, 8)) continue;
      Storage storage = tensor.to;
      if (options_.format == ModelFormat::gguf) {
        if (bits < 4) continue;
        storage = storage_of(fitting(type_of_bits(bits), columns));
      } else {
        storage.bits = bits;
      }
      const auto bytes = storage.bytes(tensor.recipe.shape);
      if (!bytes) return bytes.status();
      if (candidates[t].empty() || candidates[t].back().storage != storage)
        candidates[t].push_back({.storage = storage, .bytes = *bytes});
    }
    const auto reader = RowReader::open(source_, tensor.recipe);
    if (!reader) return reader.status();
    state.tensor = tensor.recipe.name;
    std::vector<Storage> storages;
    for (const Candidate& candidate : candidates[t]) storages.push_back(candidate.storage);
    const auto lost = measure(*reader, storages, options_.method, [&](std::int64_t rows) {
      state.done += static_cast<std::uint64_t>(rows * columns);
      progress_(state);
    });
    if (!lost) return with_tensor(source_, source_of(tensor.recipe), lost.status());
    for (std::size_t c = 0; c < candidates[t].size(); ++c) {
      const auto [error, size] = (*lost)[c];
      candidates[t][c].loss =
          size > 0 ? error / size * static_cast<double>(tensor.recipe.shape.numel()) : 0;
    }
  }

  const double room = options_.target_bpw / 8 * static_cast<double>(conversion_.weights());
  std::uint64_t bytes = 0;
  for (const OutputTensor& tensor : conversion_.tensors_) {
    const auto kept = tensor.to.bytes(tensor.recipe.shape);
    if (!kept) return kept.status();
    if (std::find(adjustable_.begin(), adjustable_.end(), &tensor) == adjustable_.end())
      bytes += *kept;
  }
  std::vector<std::size_t> chosen(adjustable_.size());
  for (const auto& options : candidates) bytes += options[0].bytes;
  if (static_cast<double>(bytes) > room) {
    return invalid(
        "--target-bpw " + short_number(options_.target_bpw) + ": the least is " +
        short_number(8 * static_cast<double>(bytes) / static_cast<double>(conversion_.weights())) +
        " with what is kept and the groups asked for, expected that or more");
  }
  for (;;) {
    double best = 0;
    std::size_t best_tensor = 0, best_choice = 0;
    for (std::size_t t = 0; t < candidates.size(); ++t) {
      const Candidate& now = candidates[t][chosen[t]];
      for (std::size_t c = chosen[t] + 1; c < candidates[t].size(); ++c) {
        const Candidate& next = candidates[t][c];
        const double more = static_cast<double>(next.bytes) - static_cast<double>(now.bytes);
        if (more <= 0 || static_cast<double>(bytes) + more > room) continue;
        if (const double gain = (now.loss - next.loss) / more; gain > best) {
          best = gain;
          best_tensor = t;
          best_choice = c;
        }
      }
    }
    if (best <= 0) break;
    bytes += candidates[best_tensor][best_choice].bytes -
             candidates[best_tensor][chosen[best_tensor]].bytes;
    chosen[best_tensor] = best_choice;
  }
  for (std::size_t t = 0; t < adjustable_.size(); ++t) {
    adjustable_[t]->to = candidates[t][chosen[t]].storage;
    adjustable_[t]->note.clear();
  }
  return {};
}

// ---- Conversion ----

Result<Conversion> Conversion::plan(const Checkpoint& source, const ConversionOptions& options,
                                    const std::string& out, const ProgressFunction& progress) {
  return ConversionPlanner(source, options, out, progress).make();
}

std::uint64_t Conversion::weights() const {
  std::uint64_t n = 0;
  for (const OutputTensor& tensor : tensors_)
    n += static_cast<std::uint64_t>(tensor.recipe.shape.numel());
  return n;
}

std::uint64_t Conversion::bytes() const {
  std::uint64_t n = 0;
  for (const OutputLayout::File& file : layout_.files) n += file.bytes;
  for (const OutputText& text : texts_) n += text.text.size();
  return n;
}

double Conversion::bits_per_weight() const {
  std::uint64_t n = 0;
  for (const OutputTensor& tensor : tensors_) n += tensor.bytes;
  return weights() == 0 ? 0 : 8 * static_cast<double>(n) / static_cast<double>(weights());
}

}  // namespace bittern
