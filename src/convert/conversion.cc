#include "convert/conversion.h"

#include <algorithm>
#include <map>
#include <utility>

#include "bittern/version.h"
#include "convert/importance.h"
#include "convert/matrix_coder.h"
#include "convert/mix.h"
#include "convert/planner.h"
#include "convert/progress.h"
#include "core/guarded.h"
#include "formats/fingerprint.h"

namespace bittern {

const char* name(ModelFormat format) {
  constexpr const char* kNames[] = {"mlx", "gguf", "safetensors", "compressed-tensors"};
  return kNames[static_cast<int>(format)];
}

namespace {

World world_of(ModelFormat format) {
  return format == ModelFormat::gguf  ? World::gguf
         : format == ModelFormat::mlx ? World::mlx
                                      : World::hf;
}

const char* float_name(SafeDType dtype) {
  return dtype == SafeDType::f16 ? "float16" : dtype == SafeDType::bf16 ? "bfloat16" : "float32";
}

// A number for each column, from the order of a recipe's source to that of its tensor, or back.
std::vector<float> move_columns(std::vector<float> numbers, const Recipe& recipe, bool back) {
  if (recipe.columns.empty() || numbers.empty()) return numbers;
  std::vector<float> moved(numbers.size());
  const auto block = static_cast<std::size_t>(recipe.column_block);
  for (std::size_t b = 0; b < recipe.columns.size(); ++b) {
    const auto other = static_cast<std::size_t>(recipe.columns[b]);
    std::copy_n(numbers.data() + (back ? b : other) * block, block,
                moved.data() + (back ? other : b) * block);
  }
  return moved;
}

}  // namespace

Result<Conversion> ConversionPlanner::make() {
  conversion_.source_ = &source_;
  BITTERN_TRY(check_options());
  BITTERN_TRY(compile_rules());
  BITTERN_TRY(make_recipes());
  if (options_.coder != nullptr) BITTERN_TRY(options_.coder->prepare(source_));
  if (!options_.imatrix.empty()) BITTERN_TRY(read_importance());
  tied_ = std::none_of(conversion_.tensors_.begin(), conversion_.tensors_.end(),
                       [&](const OutputTensor& tensor) { return is_output(tensor.recipe); });
  if (options_.mix != nullptr && !options_.pure) {
    const auto model = mix_model();
    if (!model) return model.status();
    mixed_ = types_of(*options_.mix, *model);
  }
  TeamProgress progress(progress_, {.doing = "planning", .total = conversion_.weights()});
  for (OutputTensor& tensor : conversion_.tensors_) {
    progress.begin(tensor.recipe.name);
    BITTERN_TRY(decide(tensor));
    BITTERN_TRY(progress.add(static_cast<std::uint64_t>(tensor.recipe.shape.numel())));
  }
  if (options_.target_bpw > 0) BITTERN_TRY(meet_target());
  for (OutputTensor& tensor : conversion_.tensors_) BITTERN_TRY(settle(tensor));
  if (options_.coder != nullptr &&
      std::none_of(conversion_.tensors_.begin(), conversion_.tensors_.end(),
                   [](const OutputTensor& tensor) { return tensor.coded; }))
    return refuse("@{method} " + std::string(options_.coder->method()) +
                  " has no effect: it codes none of the matrices that are quantised" +
                  (options_.format == ModelFormat::gguf
                       ? "; expected Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K or Q5_K"
                       : ""));
  BITTERN_TRY(try_rows());
  note_unused();
  const auto of_experts = [&](const OutputTensor& tensor) { return is_of_experts(tensor.recipe); };
  if (options_.format == ModelFormat::compressed_tensors &&
      std::any_of(conversion_.tensors_.begin(), conversion_.tensors_.end(), of_experts))
    note(
        "transformers 5.22 does not load the experts of a mixture from this format: they are "
        "random there");
  BITTERN_TRY(options_.format == ModelFormat::gguf ? lay_out_gguf() : lay_out_folder());
  conversion_.options_ = options_;
  conversion_.fingerprint_ = fingerprint();
  return std::move(conversion_);
}

Status ConversionPlanner::make_recipes() {
  for (const CheckpointTensor& tensor : source_.tensors())
    shapes_.push_back({tensor.name, tensor.shape});
  for (const std::string& weights : source_.not_read()) note("not read: " + weights);
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
  for (std::string& text : kinds_left_out(renaming->left_out, to)) note(std::move(text));
  return {};
}

// The dtype plain weights have, or, of a quantised model, are given.
SafeDType ConversionPlanner::folder_dtype() const {
  if (options_.dequantize) return *options_.dequantize;
  if (options_.dtype) return *options_.dtype;
  if (options_.scale_dtype) return *options_.scale_dtype;
  if (options_.transcode) return SafeDType::f32;
  std::map<SafeDType, std::uint64_t> bytes;
  for (const CheckpointTensor& tensor : source_.tensors()) {
    if (tensor.storage.kind == Storage::Kind::plain && is_float(tensor.storage.dtype) &&
        tensor.shape.rank >= 2)
      bytes[tensor.storage.dtype] += tensor.bytes();
    if (tensor.storage.kind == Storage::Kind::affine) bytes[tensor.storage.dtype] += tensor.bytes();
    if (tensor.storage.kind == Storage::Kind::blocks) bytes[SafeDType::f16] += tensor.bytes();
  }
  const auto most = std::max_element(
      bytes.begin(), bytes.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  return most == bytes.end() ? SafeDType::f32 : most->first;
}

Status ConversionPlanner::read_importance() {
  auto importance = ImportanceMatrix::open(options_.imatrix);
  if (!importance) return importance.status();
  // The matrix has GGUF's names and order of columns: those of the source's tensors, by the tensors
  // made of them.
  std::map<std::string, const Recipe*> in_gguf;
  Renaming renaming;
  if (source_.gguf() == nullptr) {
    auto made = rename_tensors(config_, shapes_, from_, World::gguf);
    if (!made) return of_source(made.status());
    renaming = std::move(*made);
    for (const Recipe& recipe : renaming.tensors)
      for (const std::string& from : recipe.sources) in_gguf.emplace(from, &recipe);
  }
  conversion_.importance_.resize(conversion_.tensors_.size());
  std::size_t found = 0;
  for (std::size_t i = 0; i < conversion_.tensors_.size(); ++i) {
    const Recipe& recipe = conversion_.tensors_[i].recipe;
    if (!is_matrix(recipe)) continue;
    const std::string& from = source_of(recipe);
    const auto known = in_gguf.find(from);
    const Recipe* const gguf = known == in_gguf.end() ? nullptr : known->second;
    if (source_.gguf() == nullptr && gguf == nullptr) continue;
    const std::int64_t columns = columns_of(recipe.shape);
    const std::int64_t matrices = recipe.shape.rank >= 3 ? recipe.shape[0] : 1;
    auto weights = importance->find(gguf == nullptr ? from : gguf->name, columns, matrices);
    if (!weights) return weights.status();
    found += !weights->empty();
    if (gguf != nullptr) *weights = move_columns(std::move(*weights), *gguf, true);
    conversion_.importance_[i] = move_columns(std::move(*weights), recipe, false);
  }
  if (found == 0)
    return invalid(options_.imatrix + ": no entry for any tensor of " + source_.path() +
                   ", expected its importance matrix");
  return {};
}

std::uint64_t ConversionPlanner::fingerprint() const {
  Fingerprint hash;
  hash.add(std::string_view(version()));  // another one may have other bits
  hash.add(source_.fingerprint());
  // Archives give files of other models the same times, and such files often have the same size.
  for (const CheckpointTensor& tensor : source_.tensors()) {
    constexpr std::size_t kSpots = 4, kSpotBytes = 256;
    const std::size_t last = tensor.data.size() - std::min(tensor.data.size(), kSpotBytes);
    for (std::size_t i = 0; i < kSpots; ++i)
      hash.add(tensor.data.subspan(last / (kSpots - 1) * i).first(tensor.data.size() - last));
  }
  hash.add(options_.method ? static_cast<std::uint64_t>(*options_.method) + 1 : 0);
  hash.add(static_cast<std::uint64_t>(options_.lossy));
  hash.add(static_cast<std::uint64_t>(options_.integer_zeros.value_or(false)));
  if (options_.coder != nullptr) {
    hash.add(options_.coder->method());
    hash.add(options_.coder->fingerprint());
  }
  for (const std::vector<float>& weights : conversion_.importance_)
    hash.add(std::as_bytes(std::span(weights)));
  for (const OutputLayout::File& file : conversion_.layout_.files) {
    // Of a GGUF file the name is OUT, which may be spelled in other ways.
    if (options_.format != ModelFormat::gguf) hash.add(file.name);
    hash.add(file.head);
  }
  for (const OutputTensor& tensor : conversion_.tensors_) {
    hash.add(tensor.to.str() + tensor.through.str());
    hash.add(static_cast<std::uint64_t>(tensor.way));
  }
  return hash.value();
}

Result<Conversion> Conversion::plan(const Checkpoint& source, const ConversionOptions& options,
                                    const std::string& out,
                                    const ModelProgressFunction& progress) noexcept try {
  auto made = ConversionPlanner(source, options, out, progress).make();
  BITTERN_TRY(source.unchanged());  // what was planned from
  return made;
} catch (...) {
  return caught(source.path());
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
