// What becomes of a tensor.
#include <algorithm>
#include <atomic>
#include <cmath>

#include "convert/for_runs.h"
#include "convert/matrix_coder.h"
#include "convert/mix.h"
#include "convert/planner.h"
#include "core/guarded.h"

namespace bittern {

namespace {

bool has(std::string_view name, std::string_view part) { return name.find(part) != name.npos; }

// A file with one tensor of another dtype is refused by mx.load as a whole.
bool mlx_reads(SafeDType dtype) {
  switch (dtype) {
    case SafeDType::f4:
    case SafeDType::f6_e2m3:
    case SafeDType::f6_e3m2:
    case SafeDType::f8_e5m2:
    case SafeDType::f8_e4m3fnuz:
    case SafeDType::f8_e5m2fnuz:
    case SafeDType::f64: return false;
    default: return true;
  }
}

}  // namespace

// Small, sensitive tensors that are not quantised by default: norms, convolutions, routers, and the
// gates of gated-delta layers.
const char* delicate(std::string_view name) {
  for (const std::string_view part : {"norm", "conv1d", "A_log", "ssm_a", "dt_bias", "ssm_dt"})
    if (has(name, part)) return "delicate";
  for (const std::string_view part : {"mlp.gate.weight", "block_sparse_moe.gate.weight", ".router.",
                                      "ffn_gate_inp", "shared_expert_gate"})
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

// What messages call it: the source's name, as the user knows it.
const std::string& source_of(const Recipe& recipe) {
  return recipe.sources.empty() ? recipe.name : recipe.sources[0];
}

GgmlType ConversionPlanner::type_of_bits(int bits) {
  return bits == 2   ? GgmlType::q2_k
         : bits == 3 ? GgmlType::q3_k
         : bits == 4 ? GgmlType::q4_k
         : bits == 5 ? GgmlType::q5_k
         : bits == 6 ? GgmlType::q6_k
                     : GgmlType::q8_0;
}

// As llama.cpp falls back where rows are no multiple of a type's block.
GgmlType ConversionPlanner::fitting(GgmlType type, std::int64_t columns) {
  if (columns % info(type).block == 0) return type;
  if (info(type).block == 256) {
    type = type == GgmlType::q2_k || type == GgmlType::q3_k ? GgmlType::q4_0
           : type == GgmlType::q4_k                         ? GgmlType::q5_0
           : type == GgmlType::q5_k                         ? GgmlType::q5_1
                                                            : GgmlType::q8_0;
    if (columns % 32 == 0) return type;
  }
  return GgmlType::f16;
}

// Whether no number becomes infinite in f16: a look at all rows, where they are not f16 already.
Result<bool> ConversionPlanner::fits_f16(const RowReader& reader) const {
  if (reader.storage() == Storage::plain(SafeDType::f16)) return true;
  struct Worker {
    RowNumbers numbers;
    float most = 0;
  };
  const std::int64_t length = rows_at_once(reader.columns());
  std::vector<Worker> workers;
  const auto look = [&](std::int64_t i, Worker& worker) -> Status {
    const std::int64_t row = i * length, count = std::min(length, reader.rows() - row);
    BITTERN_TRY(reader.numbers(row, count, worker.numbers));
    const float most = largest_magnitude(worker.numbers, count * reader.columns());
    // A NaN or an infinity is for the run to refuse, with its place.
    if (std::isfinite(most)) worker.most = std::max(worker.most, most);
    return {};
  };
  BITTERN_TRY(for_runs((reader.rows() + length - 1) / length, workers, look));
  return std::none_of(workers.begin(), workers.end(),
                      [](const Worker& worker) { return overflows(worker.most, DType::f16); });
}

// The type, or its fallback if its blocks do not divide the row.
Result<GgmlType> ConversionPlanner::type_that_fits(const RowReader& reader, GgmlType type) const {
  const GgmlType fits = fitting(type, reader.columns());
  if (fits != GgmlType::f16 || fits == type) return fits;
  const auto in_range = fits_f16(reader);
  if (!in_range) return in_range.status();
  if (*in_range) return fits;
  return reader.storage().dtype == SafeDType::bf16 ? GgmlType::bf16 : GgmlType::f32;
}

// The type by --output-tensor-type or --token-embedding-type. As in llama.cpp, an embedding that is
// also the head gets the head's type.
std::optional<GgmlType> ConversionPlanner::fixed_type(const Recipe& recipe) const {
  if (is_output(recipe)) return options_.output_type;
  if (!is_embedding(recipe)) return std::nullopt;
  return options_.embedding_type || !tied_ ? options_.embedding_type : options_.output_type;
}

bool ConversionPlanner::is_of_experts(const Recipe& recipe) const {
  return has(recipe.name, ".experts.");
}

// Why compressed-tensors' loaders do not take this matrix as codes, or null. transformers 5.22
// unpacks experts without their zero points; by its sources vLLM does so, too, with embeddings.
const char* ConversionPlanner::not_compressed(const Recipe& recipe) const {
  if (options_.format != ModelFormat::compressed_tensors) return nullptr;
  if (has(recipe.name, "embed") || has(recipe.name, "wte.")) return "an embedding";
  if (is_of_experts(recipe)) return "of experts";
  if (recipe.shape.rank != 2 || recipe.shape.numel() == 0) return "no matrix of a linear layer";
  return nullptr;
}

// Why a tensor is not quantised (the text may be empty if that needs no note); nothing if it is.
// Options that name the head or the embedding win over rules.
std::optional<std::string> ConversionPlanner::why_kept(const Recipe& recipe) const {
  if (!is_matrix(recipe)) return "";
  if (fixed_type(recipe)) return std::nullopt;
  if (options_.leave_output && is_output(recipe)) return "left as it is by @{leave_output_tensor}";
  const TensorRule* rule = rule_for(recipe);
  if (rule != nullptr && rule->keep) return "kept by " + pattern_text(*rule);
  const char* why = delicate(recipe.name);
  if (options_.format == ModelFormat::compressed_tensors && is_output(recipe)) why = "the head";
  if (const char* not_codes = not_compressed(recipe))
    return std::string(why == nullptr ? not_codes : why) + ": left as it is";
  if (rule != nullptr || options_.pure || why == nullptr) return std::nullopt;
  return std::string(why) + ": left as it is";
}

// The type a matrix of a GGUF file is to have, whatever its rows.
GgmlType ConversionPlanner::type_for(const OutputTensor& tensor, const TensorRule* rule) const {
  if (const auto fixed = fixed_type(tensor.recipe)) return *fixed;
  if (rule != nullptr && rule->type) return *rule->type;
  if (rule != nullptr && rule->bits > 0) return type_of_bits(rule->bits);
  if (!mixed_.empty())
    return mixed_[static_cast<std::size_t>(&tensor - conversion_.tensors_.data())];
  if (options_.mix != nullptr) return options_.mix->type;
  return options_.type.value_or(type_of_bits(options_.bits > 0 ? options_.bits : 4));
}

bool ConversionPlanner::casts_only() const {
  return options_.dtype && options_.bits == 0 && !options_.type && options_.mix == nullptr &&
         options_.target_bpw == 0;
}

Status ConversionPlanner::decide(OutputTensor& tensor) {
  const Recipe& recipe = tensor.recipe;
  auto reader = RowReader::open(source_, recipe);
  if (!reader) return reader.status();
  tensor.from = reader->storage();
  tensor.to = kept(tensor);
  if (reader->mixed() && tensor.to.quantized())
    tensor.to = Storage::plain(options_.dtype.value_or(SafeDType::f32));
  const bool arithmetic =
      tensor.from.quantized() || is_float(tensor.from.dtype) || tensor.from.dtype == SafeDType::f64;
  if (!arithmetic) {
    if (options_.format == ModelFormat::mlx && !mlx_reads(tensor.from.dtype))
      return unsupported(source_.path() + ": tensor " + source_of(recipe) + ": " +
                         bittern::name(tensor.from.dtype) +
                         ", which MLX does not read, expected @{format} safetensors");
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
  if (casts_only()) {
    if (!tensor.from.quantized()) return {};
    return refuse("tensor " + source_of(recipe) + " is quantised (" + tensor.from.str() +
                  "); @{dtype} converts plain numbers, @{dequantize} makes numbers plain");
  }

  if (auto why = why_kept(recipe)) {
    tensor.note = std::move(*why);
    return {};
  }
  const TensorRule* rule = rule_for(recipe);
  const std::int64_t columns = columns_of(recipe.shape);
  Storage wanted;
  if (options_.format == ModelFormat::gguf) {
    const GgmlType type = type_for(tensor, rule);
    const auto fits = type_that_fits(*reader, type);
    if (!fits) return fits.status();
    if (*fits != type) {
      tensor.note = "rows of " + std::to_string(columns) + " are no multiple of " +
                    std::to_string(info(type).block) + ": " + info(*fits).name + " in place of " +
                    info(type).name;
    }
    wanted = storage_of(*fits);
  } else {
    if (options_.format == ModelFormat::mlx && hides_a_key(recipe.name)) {
      tensor.note = "config.json has no place for a module of this name: left as it is";
      return {};
    }
    const int bits = rule != nullptr && rule->bits > 0 ? rule->bits
                     : options_.bits > 0               ? options_.bits
                                                       : 4;
    int group = rule != nullptr && rule->group > 0 ? rule->group : options_.group;
    if (any_group(rule) && columns % group != 0) group = kGroups[0];
    if (columns % group != 0) {
      tensor.note = "rows of " + std::to_string(columns) + " are no multiple of " +
                    std::to_string(group) + ": left as it is";
      return {};
    }
    wanted = affine(bits, group, scale_dtype(tensor.from));
  }
  const bool adjustable = options_.target_bpw > 0 && !fixed_type(recipe) &&
                          (rule == nullptr || (rule->bits == 0 && !rule->type));
  if (tensor.from.quantized() && (tensor.from != wanted || adjustable) &&
      !options_.allow_requantize) {
    // Advice must work: a type that is not read can be neither.
    RowNumbers numbers;
    if (reader->rows() > 0)
      if (const Status status = reader->numbers(0, 1, numbers); !status.ok())
        return with_tensor(source_, source_of(recipe), status);
    const bool exact = options_.format == ModelFormat::mlx ||
                       options_.format == ModelFormat::compressed_tensors ||
                       (options_.format == ModelFormat::gguf && source_.gguf() != nullptr);
    return refuse("tensor " + source_of(recipe) + " is quantised already (" + tensor.from.str() +
                  "), expected plain numbers; " +
                  (exact ? "@{transcode} keeps every number, " : "") +
                  "@{dequantize} writes them plain, @{allow_requantize} quantises once more");
  }
  tensor.to = wanted;
  tensor.way = OutputTensor::Way::quantize;
  if (adjustable) adjustable_.push_back(&tensor);
  return {};
}

// The storage of a tensor that is not quantised: its own if the output format has it; for plain
// tensors the dtype of --dtype.
Storage ConversionPlanner::kept(const OutputTensor& tensor) const {
  using Kind = Storage::Kind;
  const Storage& from = tensor.from;
  const bool f64 = from.kind == Kind::plain && from.dtype == SafeDType::f64;
  const bool plain = f64 || (from.kind == Kind::plain && is_float(from.dtype));
  // MLX and llama.cpp read no F64.
  const SafeDType same =
      f64 && options_.format != ModelFormat::safetensors ? SafeDType::f32 : from.dtype;
  if (options_.format == ModelFormat::gguf) {
    const bool vector = tensor.recipe.shape.rank < 2 || delicate(tensor.recipe.name);
    if (plain) return Storage::plain(vector ? SafeDType::f32 : options_.dtype.value_or(same));
    if (from.kind == Kind::affine) return Storage::plain(options_.dtype.value_or(SafeDType::f32));
    return from;
  }
  // mlx-lm leaves the decay of gated-delta layers alone, too.
  if (plain)
    return Storage::plain(has(tensor.recipe.name, "A_log") ? same : options_.dtype.value_or(same));
  if (from.kind == Kind::blocks) return Storage::plain(options_.dtype.value_or(SafeDType::f32));
  const bool packed = options_.format == ModelFormat::compressed_tensors;
  if (from.kind == Kind::affine && (options_.format == ModelFormat::safetensors ||
                                    packed != (from.zeros == Storage::Zeros::packed)))
    return Storage::plain(options_.dtype.value_or(from.dtype));
  return from;
}

Storage ConversionPlanner::affine(int bits, int group, SafeDType params) const {
  using Zeros = Storage::Zeros;
  return Storage::affine(bits, group, params,
                         options_.format == ModelFormat::compressed_tensors ? Zeros::packed
                         : options_.integer_zeros.value_or(false)           ? Zeros::integers
                                                                            : Zeros::biases);
}

SafeDType ConversionPlanner::scale_dtype(const Storage& from) const {
  if (options_.scale_dtype) return *options_.scale_dtype;
  if (options_.dtype) return *options_.dtype;
  if (from.kind == Storage::Kind::blocks) return SafeDType::f16;
  return is_float(from.dtype) ? from.dtype : SafeDType::f32;
}

// The numbers themselves, where MLX has no grid for them: F16 where that is exact, else F32.
Status ConversionPlanner::keep_plain(OutputTensor& tensor, const RowReader& reader,
                                     const std::string& why) {
  std::atomic<bool> halves = true;
  const std::int64_t columns = reader.columns(), length = rows_at_once(columns);
  std::vector<RowNumbers> workers;
  const auto scan = [&](std::int64_t i, RowNumbers& numbers) -> Status {
    const std::int64_t row = i * length, count = std::min(length, reader.rows() - row);
    BITTERN_TRY(reader.numbers(row, count, numbers));
    BITTERN_TRY(expect_finite(numbers, count * columns, columns));
    if (!halves || numbers.dtype == DType::f16) return {};
    std::vector<float> values(static_cast<std::size_t>(count * columns));
    BITTERN_TRY(as_f32(numbers, values));
    if (!std::all_of(values.begin(), values.end(), [](float x) { return to_f32(to_f16(x)) == x; }))
      halves = false;
    return {};
  };
  const Status status = for_runs((reader.rows() + length - 1) / length, workers, scan);
  if (!status.ok()) return with_tensor(source_, source_of(tensor.recipe), status);
  tensor.to = Storage::plain(halves ? SafeDType::f16 : SafeDType::f32);
  tensor.note = tensor.from.str() + why + ": kept as plain " + tensor.to.str();
  return {};
}

Status ConversionPlanner::decide_transcode(OutputTensor& tensor, const RowReader& reader) {
  if (!tensor.from.quantized()) return {};
  const auto grid = grid_of(tensor.from);
  const Recipe& recipe = tensor.recipe;
  const std::int64_t columns = columns_of(recipe.shape);
  if (options_.format == ModelFormat::safetensors)
    return invalid(
        "@{transcode}: a folder of plain safetensors has no codes, expected @{format} mlx or gguf "
        "(or @{dequantize} f32)");
  if (options_.format == ModelFormat::compressed_tensors)
    return decide_compressed(tensor, reader, grid);
  const bool blocks = tensor.from.kind == Storage::Kind::blocks;
  if (options_.format == ModelFormat::gguf && blocks && reader.movable()) return {};
  if (options_.format == ModelFormat::mlx) {
    if (!blocks && reader.movable() && !options_.scale_dtype) return {};
    GridRows row;
    std::string why;
    if (reader.mixed()) {
      why = " beside other types in one tensor";
    } else if (!grid || grid->group < 32) {
      why = " has no form in MLX's groups of 32, 64 or 128";
    } else if (reader.rows() > 0) {
      const Status status = reader.grid(0, 1, row);
      if (status.code() == Code::unsupported) why = " (" + std::string(status.message()) + ")";
    }
    if (why.empty()) {
      tensor.to = Storage::affine(grid->bits, std::min(grid->group, 128),
                                  options_.scale_dtype.value_or(SafeDType::f32));
      tensor.way = OutputTensor::Way::transcode;
      return {};
    }
    if (!options_.lossy || columns % 32 != 0) return keep_plain(tensor, reader, why);
    const int bits = reader.mixed()                       ? 8
                     : !blocks                            ? tensor.from.bits
                     : tensor.from.type == GgmlType::q2_k ? 3
                     : tensor.from.type == GgmlType::q3_k ? 4
                                                          : 8;
    tensor.to = Storage::affine(bits, 32, options_.scale_dtype.value_or(SafeDType::f32));
    tensor.way = OutputTensor::Way::quantize;
    tensor.note =
        "not exact: " + tensor.from.str() + " quantised again to " + std::to_string(bits) + " bits";
    return {};
  }
  // The smallest type that holds every number: a trial over all rows.
  std::string why;
  for (const WrittenType& type : kWritten) {
    const GgmlType t = type.type;
    if (storage_of(t).kind != Storage::Kind::blocks || columns % info(t).block != 0) continue;
    const Status fits = try_transcode(reader, storage_of(t));
    if (fits.ok()) {
      tensor.to = storage_of(t);
      tensor.way = OutputTensor::Way::transcode;
      return {};
    }
    if (fits.code() != Code::unsupported) return fits;
    why = std::string(fits.message());
  }
  if (options_.lossy) {
    const GgmlType type = fitting(type_of_bits(std::max(grid ? grid->bits : 8, 4)), columns);
    tensor.to = storage_of(type);
    tensor.way = OutputTensor::Way::quantize;
    tensor.note = "not exact: " + tensor.from.str() + " quantised again to " + info(type).name;
    return {};
  }
  if (why.empty()) why = "rows of " + std::to_string(columns) + " are no multiple of 32";
  return unsupported(source_.path() + ": tensor " + source_of(recipe) +
                     ": no type of GGUF holds its numbers exactly (" + why +
                     "), expected @{lossy} (numbers change) or @{dequantize}");
}

// The same codes with zero points where all biases are such; the numbers themselves elsewhere.
Status ConversionPlanner::decide_compressed(OutputTensor& tensor, const RowReader& reader,
                                            const std::optional<Grid>& grid) {
  const Storage& from = tensor.from;
  std::string why;
  if (const char* not_codes = not_compressed(tensor.recipe)) {
    why = std::string(" is ") + not_codes;
  } else if (reader.mixed()) {
    why = " beside other types in one tensor";
  } else if (!grid || grid->group < 32) {
    why = " has no form in groups of 32 or more";
  } else {
    const SafeDType own = from.kind == Storage::Kind::blocks ? SafeDType::f16 : from.dtype;
    // Whether zero points are such does not depend on what scales are rounded to.
    const Storage exact =
        affine(grid->bits, std::min(grid->group, 128), options_.scale_dtype ? SafeDType::f32 : own);
    const Status fits = try_transcode(reader, exact);
    if (fits.ok()) {
      tensor.to = affine(exact.bits, exact.group, options_.scale_dtype.value_or(own));
      tensor.way = OutputTensor::Way::transcode;
      return {};
    }
    if (fits.code() != Code::unsupported) return fits;
    why = " (" + std::string(fits.message()) + ")";
    if (options_.lossy) {
      tensor.to = affine(exact.bits, exact.group, options_.scale_dtype.value_or(own));
      tensor.way = OutputTensor::Way::quantize;
      tensor.note = "not exact: " + from.str() + " quantised again to " +
                    std::to_string(exact.bits) + " bits";
      return {};
    }
  }
  return keep_plain(tensor, reader, why);
}

Status ConversionPlanner::try_transcode(const RowReader& reader, const Storage& to) {
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

std::optional<CodedGrid> coded_grid(const Storage& to) {
  if (to.kind == Storage::Kind::affine) {
    const auto dtype = to_dtype(to.dtype);
    if (!dtype) return std::nullopt;
    return CodedGrid{.bits = to.bits,
                     .group = to.group,
                     .params = *dtype,
                     .biases = to.zeros == Storage::Zeros::packed ? DType::f32 : *dtype,
                     .integer_zeros = to.zeros != Storage::Zeros::biases};
  }
  if (to == Storage::blocks(GgmlType::q4_1)) return CodedGrid{4, 32, DType::f16, DType::f16};
  if (to == Storage::blocks(GgmlType::q5_1)) return CodedGrid{5, 32, DType::f16, DType::f16};
  for (const auto& [type, bits] :
       {std::pair(GgmlType::q4_0, 4), std::pair(GgmlType::q5_0, 5), std::pair(GgmlType::q8_0, 8)})
    if (to == Storage::blocks(type))
      return CodedGrid{bits, 32, DType::f16, DType::f32, true, 1 << (bits - 1)};
  return std::nullopt;
}

// F64 that is copied may hold what no reader that computes in f32 can.
Status ConversionPlanner::note_beyond_f32(OutputTensor& tensor, const RowReader& reader) {
  const std::int64_t columns = reader.columns(), length = rows_at_once(columns);
  RowNumbers numbers;
  for (std::int64_t row = 0; row < reader.rows(); row += length) {
    BITTERN_TRY(reader.numbers(row, std::min(length, reader.rows() - row), numbers));
    if (numbers.beyond.count == 0) continue;
    tensor.note += (tensor.note.empty() ? "" : "; ") + beyond_f32(numbers, columns) +
                   ": kept as F64, an infinity to programs that compute in f32";
    return {};
  }
  return {};
}

// Way and size, once the storage is settled.
Status ConversionPlanner::settle(OutputTensor& tensor) {
  using Way = OutputTensor::Way;
  auto reader = RowReader::open(source_, tensor.recipe);
  if (!reader) return reader.status();
  if (tensor.way != Way::transcode) {
    const bool same = tensor.to == tensor.from;
    // Zero points that share words with those of other rows do not move with their row.
    const bool packed = same && tensor.to.zeros == Storage::Zeros::packed && !reader->mixed();
    tensor.way = same && reader->movable() ? Way::copy
                 : packed                  ? Way::transcode
                 : tensor.to.quantized()   ? Way::quantize
                                           : Way::cast;
  }
  if (tensor.way == Way::copy && tensor.from == Storage::plain(SafeDType::f64))
    BITTERN_TRY(note_beyond_f32(tensor, *reader));
  // Quantised, then written as plain numbers.
  if (options_.format == ModelFormat::safetensors && tensor.to.kind == Storage::Kind::affine &&
      tensor.way == Way::quantize) {
    tensor.through = tensor.to;
    tensor.to = Storage::plain(tensor.to.dtype);
  }
  if (options_.coder != nullptr && tensor.to.quantized()) {
    const auto why = options_.coder->declines(tensor);
    tensor.coded = !why;
    if (tensor.coded) tensor.way = Way::quantize;
    if (why && !why->empty()) tensor.note += (tensor.note.empty() ? "" : "; ") + *why;
  } else if (options_.method && tensor.way == Way::quantize && !is_fitted(tensor.to))
    tensor.note += std::string(tensor.note.empty() ? "" : "; ") + "by " + tensor.to.str() +
                   "'s own rule: @{method} is for Q4_1, Q5_1, Q4_K and Q5_K";
  if (tensor.way == Way::cast && tensor.from.quantized() && !options_.dequantize &&
      !options_.allow_requantize)
    tensor.note = tensor.note.empty() ? "quantised, written as " + tensor.to.str() : tensor.note;
  if (tensor.way == Way::cast && tensor.from == Storage::plain(SafeDType::f64) &&
      !options_.dequantize && !options_.dtype && tensor.note.empty())
    tensor.note = "F64, which " + std::string(name(options_.format)) + " has not: written as " +
                  tensor.to.str();
  auto bytes = tensor.to.bytes(tensor.recipe.shape);
  throw_if_out_of_memory(bytes.status());
  if (!bytes)
    return refuse("tensor " + tensor.recipe.name + ": " + std::string(bytes.status().message()));
  tensor.bytes = *bytes;
  return {};
}

}  // namespace bittern
