// bittern inspect MODEL [--compare OTHER]: what a model file holds, and how far another is from it.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <optional>

#include "cli/cli.h"
#include "convert/compare.h"
#include "formats/checkpoint.h"
#include "formats/decode.h"
#include "formats/json_tree.h"
#include "formats/safetensors.h"

namespace bittern::cli {
namespace {

constexpr std::size_t kWorstGroups = 10;

struct InspectFlags {
  CommonFlags common;
  std::string model, other;
  bool tensors = false;
};

// A tensor as it is listed.
struct Listed {
  std::string name;
  std::vector<std::uint64_t> shape;
  std::string storage;
  std::uint64_t parameters = 0, bytes = 0;
  bool decodable = true;
};

// All that is known of a model; what is not stays empty.
struct Summary {
  std::string path, kind, form;    // kind: a word for programs; form: words for people
  std::vector<std::string> files;  // that were read
  std::optional<std::string> architecture, model_class, name;
  std::optional<std::uint64_t> layers, hidden_size, heads, key_value_heads, experts, vocabulary,
      context;
  Json quantization;  // as the folder's config.json has it
  std::vector<Listed> tensors;
  std::vector<std::string> notes;

  std::uint64_t parameters() const {
    std::uint64_t n = 0;
    for (const Listed& tensor : tensors) n += tensor.parameters;
    return n;
  }
  std::uint64_t bytes() const {
    std::uint64_t n = 0;
    for (const Listed& tensor : tensors) n += tensor.bytes;
    return n;
  }
};

std::string with_commas(std::uint64_t n) {
  std::string text = std::to_string(n);
  for (auto at = static_cast<std::ptrdiff_t>(text.size()) - 3; at > 0; at -= 3)
    text.insert(static_cast<std::size_t>(at), ",");
  return text;
}

std::optional<double> bits_per_weight(std::uint64_t bytes, std::uint64_t parameters) {
  if (parameters == 0) return std::nullopt;
  return 8 * static_cast<double>(bytes) / static_cast<double>(parameters);
}

std::string bits_text(std::uint64_t bytes, std::uint64_t parameters) {
  const auto bits = bits_per_weight(bytes, parameters);
  return bits ? fmt::format("{:.3f}", *bits) : "-";
}

std::vector<std::uint64_t> dims(const Shape& shape) {
  return {shape.dim.begin(), shape.dim.begin() + shape.rank};
}

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

// "4 bit, group 64, affine; 3 modules differ"
std::string quantization_text(const Json& settings) {
  std::vector<std::string> words;
  if (const auto method = text_in(member(settings, "quant_method"))) words.push_back(*method);
  const auto whole = [&](std::string_view key, std::string_view other) -> std::string {
    const Json* value = member(settings, key);
    if (value == nullptr) value = member(settings, other);
    return value != nullptr && value->is_number_integer() ? value->dump() : "";
  };
  if (const auto bits = whole("bits", "w_bit"); !bits.empty()) words.push_back(bits + " bit");
  if (const auto group = whole("group_size", "q_group_size"); !group.empty())
    words.push_back("group " + group);
  if (const auto mode = text_in(member(settings, "mode"))) words.push_back(*mode);
  std::string line = fmt::format("{}", fmt::join(words, ", "));
  std::size_t modules = 0;
  if (!member(settings, "quant_method")) {
    for (const auto& [key, value] : settings.items())
      modules += value.is_object() || value.is_boolean();
  }
  if (modules > 0) line += fmt::format("; {} module{} apart", modules, modules == 1 ? "" : "s");
  return line.empty() ? "settings in config.json" : line;
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

struct StorageTotal {
  std::string storage;
  std::uint64_t tensors = 0, parameters = 0, bytes = 0;
};

// The largest first.
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

// ---- as text ----

void print_summary(const Summary& summary) {
  fmt::print("{}: {}\n", printable(summary.path), summary.form);
  const auto line = [](const char* label, const std::string& value) {
    fmt::print("  {:<14} {}\n", label, printable(value));
  };
  const auto number = [&](const char* label, const std::optional<std::uint64_t>& value) {
    if (value) line(label, std::to_string(*value));
  };
  if (summary.architecture || summary.model_class) {
    std::string text = summary.architecture.value_or("");
    if (summary.model_class)
      text += text.empty() ? *summary.model_class : " (" + *summary.model_class + ")";
    line("architecture", text);
  }
  if (summary.name) line("name", *summary.name);
  number("layers", summary.layers);
  number("hidden size", summary.hidden_size);
  if (summary.heads) {
    line("heads", summary.key_value_heads ? fmt::format("{}, {} for keys and values",
                                                        *summary.heads, *summary.key_value_heads)
                                          : std::to_string(*summary.heads));
  }
  number("experts", summary.experts);
  number("vocabulary", summary.vocabulary);
  number("context", summary.context);
  if (!summary.quantization.is_null()) line("quantised", quantization_text(summary.quantization));
  const std::uint64_t parameters = summary.parameters(), bytes = summary.bytes();
  line("parameters", with_commas(parameters));
  line("size",
       fmt::format("{}, {} bits per weight", size_text(bytes), bits_text(bytes, parameters)));
  fmt::print("\n  {:<26} {:>8} {:>16} {:>10} {:>7}\n", "storage", "tensors", "parameters", "bytes",
             "share");
  for (const StorageTotal& total : totals(summary)) {
    const double share =
        100 * static_cast<double>(total.bytes) / static_cast<double>(std::max(bytes, {1}));
    fmt::print("  {:<26} {:>8} {:>16} {:>10} {:>5.1f} %\n", total.storage, total.tensors,
               with_commas(total.parameters), size_text(total.bytes), share);
  }
  for (const std::string& note : summary.notes) fmt::print("note: {}\n", printable(note));
}

std::size_t name_width(const Summary& summary) {
  std::size_t width = 10;
  for (const Listed& tensor : summary.tensors) width = std::max(width, tensor.name.size());
  return std::min<std::size_t>(width, 72);
}

void print_tensors(const Summary& summary) {
  const std::size_t width = name_width(summary);
  fmt::print("\n{:<{}} {:>20} {:>26} {:>12} {:>7}\n", "tensor", width, "shape", "storage", "bytes",
             "bits");
  for (const Listed& tensor : summary.tensors) {
    fmt::print("{:<{}} {:>20} {:>26} {:>12} {:>7}\n", printable(tensor.name), width,
               fmt::format("[{}]", fmt::join(tensor.shape, ",")), tensor.storage, tensor.bytes,
               bits_text(tensor.bytes, tensor.parameters));
  }
}

void print_comparison(const Comparison& comparison) {
  std::size_t width = 10, equal = 0;
  for (const TensorDifference& tensor : comparison.tensors) {
    width = std::max(width, tensor.name.size());
    equal += tensor.different == 0;
  }
  width = std::min<std::size_t>(width, 72);
  fmt::print("\n{:<{}} {:>20} {:>26} {:>26} {:>14} {:>13}\n", "tensor", width, "shape", "storage",
             "of the other", "relative error", "max abs error");
  for (const TensorDifference& tensor : comparison.tensors) {
    fmt::print("{:<{}} {:>20} {:>26} {:>26} {:>14.4g} {:>13.4g}{}\n", printable(tensor.name), width,
               tensor.shape.str(), tensor.a.str(), tensor.b.str(), tensor.relative_error(),
               tensor.max_abs_error,
               tensor.not_finite == 0
                   ? ""
                   : fmt::format("  {} infinite or NaN in one alone", tensor.not_finite));
  }
  if (!comparison.worst_groups.empty()) {
    fmt::print(
        "\nworst groups of {} columns: their root mean square error over that of the "
        "tensor's numbers\n",
        kComparedGroup);
    for (const GroupDifference& group : comparison.worst_groups) {
      fmt::print("{:<{}} row {}, column {}: {:.4g}\n",
                 printable(comparison.tensors[group.tensor].name), width, group.row, group.column,
                 group.error);
    }
  }
  const auto names = [](const char* where, const std::vector<std::string>& all) {
    if (all.empty()) return;
    fmt::print("\nonly in {}:\n", where);
    for (const std::string& name : all) fmt::print("  {}\n", printable(name));
  };
  names("the model", comparison.only_in_a);
  names("the other", comparison.only_in_b);
  if (!comparison.shapes_differ.empty()) fmt::print("\nof other shapes:\n");
  for (const Comparison::Shapes& shapes : comparison.shapes_differ)
    fmt::print("  {} {} and {}\n", printable(shapes.name), shapes.a.str(), shapes.b.str());
  if (!comparison.not_compared.empty()) fmt::print("\nnot compared:\n");
  for (const Comparison::Skipped& skipped : comparison.not_compared)
    fmt::print("  {}: {}\n", printable(skipped.name), printable(skipped.reason));
  fmt::print(
      "\n{} tensors compared, {} equal; over all numbers: relative error {:.6g}, "
      "max abs error {:.6g}\n",
      comparison.tensors.size(), equal, comparison.relative_error(), comparison.max_abs_error());
  const std::vector<const TensorDifference*> sick = comparison.not_finite();
  if (sick.empty()) return;
  fmt::print("{} tensors hold infinities or NaN, which these totals leave out:\n", sick.size());
  for (const TensorDifference* tensor : sick)
    fmt::print("  {}: {} in the model, {} in the other\n", printable(tensor->name),
               tensor->not_finite_a, tensor->not_finite_b);
}

// ---- as JSON: docs/inspect.md ----

template <class T>
Json or_null(const std::optional<T>& value) {
  return value ? Json(*value) : Json();
}

Json summary_json(const Summary& summary) {
  Json storages = Json::array(), tensors = Json::array();
  for (const StorageTotal& total : totals(summary)) {
    storages.push_back({{"storage", total.storage},
                        {"tensors", total.tensors},
                        {"parameters", total.parameters},
                        {"bytes", total.bytes}});
  }
  for (const Listed& tensor : summary.tensors) {
    tensors.push_back(
        {{"name", tensor.name},
         {"shape", tensor.shape},
         {"storage", tensor.storage},
         {"bytes", tensor.bytes},
         {"bits_per_weight", or_null(bits_per_weight(tensor.bytes, tensor.parameters))},
         {"decodable", tensor.decodable}});
  }
  return {{"path", summary.path},
          {"kind", summary.kind},
          {"architecture", or_null(summary.architecture)},
          {"class", or_null(summary.model_class)},
          {"name", or_null(summary.name)},
          {"layers", or_null(summary.layers)},
          {"hidden_size", or_null(summary.hidden_size)},
          {"heads", or_null(summary.heads)},
          {"key_value_heads", or_null(summary.key_value_heads)},
          {"experts", or_null(summary.experts)},
          {"vocabulary", or_null(summary.vocabulary)},
          {"context", or_null(summary.context)},
          {"quantization", summary.quantization},
          {"parameters", summary.parameters()},
          {"bytes", summary.bytes()},
          {"bits_per_weight", or_null(bits_per_weight(summary.bytes(), summary.parameters()))},
          {"storages", storages},
          {"notes", summary.notes},
          {"tensors", tensors}};
}

Json comparison_json(const Comparison& comparison) {
  Json tensors = Json::array(), groups = Json::array(), shapes = Json::array(),
       skipped = Json::array();
  std::size_t equal = 0;
  for (const TensorDifference& tensor : comparison.tensors) {
    equal += tensor.different == 0;
    tensors.push_back({{"name", tensor.name},
                       {"shape", dims(tensor.shape)},
                       {"storage", tensor.a.str()},
                       {"other_storage", tensor.b.str()},
                       {"relative_error", tensor.relative_error()},
                       {"max_abs_error", tensor.max_abs_error},
                       {"different", tensor.different},
                       {"not_finite", tensor.not_finite},
                       {"not_finite_in_model", tensor.not_finite_a},
                       {"not_finite_in_other", tensor.not_finite_b}});
  }
  for (const GroupDifference& group : comparison.worst_groups) {
    groups.push_back({{"tensor", comparison.tensors[group.tensor].name},
                      {"row", group.row},
                      {"column", group.column},
                      {"error", group.error}});
  }
  for (const Comparison::Shapes& one : comparison.shapes_differ) {
    shapes.push_back({{"name", one.name}, {"shape", dims(one.a)}, {"other_shape", dims(one.b)}});
  }
  for (const Comparison::Skipped& one : comparison.not_compared)
    skipped.push_back({{"name", one.name}, {"reason", one.reason}});
  Json sick = Json::array();
  for (const TensorDifference* tensor : comparison.not_finite()) sick.push_back(tensor->name);
  return {{"relative_error", comparison.relative_error()},
          {"max_abs_error", comparison.max_abs_error()},
          {"not_finite_tensors", sick},
          {"equal", equal},
          {"group_columns", kComparedGroup},
          {"tensors", tensors},
          {"worst_groups", groups},
          {"only_in_model", comparison.only_in_a},
          {"only_in_other", comparison.only_in_b},
          {"shapes_differ", shapes},
          {"not_compared", skipped}};
}

Status run_compare(const InspectFlags& flags) {
  const auto model = Checkpoint::open(flags.model);
  if (!model) return model.status();
  const auto other = Checkpoint::open(flags.other);
  if (!other) return other.status();
  std::vector<std::string> inputs = model->files();
  for (std::string& file : other->files()) inputs.push_back(std::move(file));
  BITTERN_TRY(check_apart(json_output(flags.common), inputs));
  Progress progress(flags.common.quiet);
  const auto comparison =
      compare(*model, *other, kWorstGroups, [&](const ComparisonProgress& state) {
        progress.show(fmt::format("comparing {:3.0f} %: {}",
                                  100 * static_cast<double>(state.done) /
                                      static_cast<double>(std::max<std::uint64_t>(state.all, 1)),
                                  printable(state.tensor)));
      });
  progress.clear();
  BITTERN_TRY(model->unchanged());
  BITTERN_TRY(other->unchanged());
  if (!comparison) return comparison.status();
  const Summary summary = summarize(*model), other_summary = summarize(*other);
  if (!flags.common.quiet) {
    print_summary(summary);
    if (flags.tensors) print_tensors(summary);
    fmt::print("\n");
    print_summary(other_summary);
    if (flags.tensors) print_tensors(other_summary);
    print_comparison(*comparison);
  }
  if (flags.common.json.empty()) return {};
  return write_json(flags.common, {{"schema", 1},
                                   {"model", summary_json(summary)},
                                   {"other", summary_json(other_summary)},
                                   {"comparison", comparison_json(*comparison)}});
}

Status run(const InspectFlags& flags) {
  BITTERN_TRY(use_threads(flags.common));
  BITTERN_TRY(check_json_flag(flags.common));
  if (!flags.other.empty()) return run_compare(flags);
  const auto summary = summarize(flags.model);
  if (!summary) return summary.status();
  BITTERN_TRY(check_apart(json_output(flags.common), summary->files));
  if (!flags.common.quiet) {
    print_summary(*summary);
    if (flags.tensors) print_tensors(*summary);
  }
  if (flags.common.json.empty()) return {};
  return write_json(flags.common, {{"schema", 1}, {"model", summary_json(*summary)}});
}

}  // namespace

Verb inspect_verb(CLI::App& main) {
  auto flags = std::make_shared<InspectFlags>();
  CLI::App* verb = main.add_subcommand("inspect", "what a model file holds");
  verb->add_option("MODEL", flags->model,
                   "a .gguf or .safetensors file, or a folder of Hugging Face or MLX")
      ->required();
  verb->add_flag("--tensors", flags->tensors, "a line for each tensor");
  verb->add_option("--compare", flags->other,
                   "another model: how far each of its tensors is from MODEL's");
  add_output_flags(*verb, flags->common);
  verb->footer(
      "Example: bittern inspect model.gguf --tensors\n"
      "         bittern inspect model-bf16 --compare model-4bit --json report.json");
  return {verb, [flags] { return run(*flags); }};
}

}  // namespace bittern::cli
