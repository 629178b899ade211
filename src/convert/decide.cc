// What becomes of a tensor.
#include <algorithm>
#include <cmath>

#include "convert/planner.h"

namespace bittern {

namespace {

bool has(std::string_view name, std::string_view part) { return name.find(part) != name.npos; }

}  // namespace

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

GgmlType ConversionPlanner::type_of_bits(int bits) {
  return bits == 2   ? GgmlType::q2_k
         : bits == 3 ? GgmlType::q3_k
         : bits == 4 ? GgmlType::q4_k
         : bits == 5 ? GgmlType::q5_k
         : bits == 6 ? GgmlType::q6_k
                     : GgmlType::q8_0;
}

// As llama.cpp falls back where rows are no multiple of a type's block, but that it has IQ4_NL for
// Q2_K and Q3_K, which is not written here: Q4_0 has as many bits.
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

Status ConversionPlanner::decide(OutputTensor& tensor) {
  const Recipe& recipe = tensor.recipe;
  auto reader = RowReader::open(source_, recipe);
  if (!reader) return reader.status();
  tensor.from = reader->storage();
  tensor.to = kept(tensor);
  const bool arithmetic =
      tensor.from.quantized() || is_float(tensor.from.dtype) || tensor.from.dtype == SafeDType::f64;
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
    GgmlType fits = fitting(type, columns);
    if (fits == GgmlType::f16 && fits != type) {
      const auto in_range = fits_f16(*reader);
      if (!in_range) return in_range.status();
      if (!*in_range) fits = tensor.from.dtype == SafeDType::bf16 ? GgmlType::bf16 : GgmlType::f32;
    }
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
  const bool adjustable =
      options_.target_bpw > 0 && (rule == nullptr || (rule->bits == 0 && !rule->type));
  if (tensor.from.quantized() && (tensor.from != wanted || adjustable) &&
      !options_.allow_requantize) {
    return refuse("tensor " + source_of(recipe) + " is quantised already (" + tensor.from.str() +
                  "), expected plain numbers; --transcode keeps them exact, --dequantize writes "
                  "them plain, "
                  "--allow-requantize quantises once more");
  }
  tensor.to = wanted;
  tensor.way = OutputTensor::Way::quantize;
  if (adjustable) adjustable_.push_back(&tensor);
  return {};
}

// How a tensor stays, in the format asked for: its storage, where that has it.
Storage ConversionPlanner::kept(const OutputTensor& tensor) const {
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

SafeDType ConversionPlanner::scale_dtype(const Storage& from) const {
  if (options_.scale_dtype) return *options_.scale_dtype;
  if (from.kind == Storage::Kind::blocks) return SafeDType::f16;
  return is_float(from.dtype) ? from.dtype : SafeDType::f32;
}

Status ConversionPlanner::decide_transcode(OutputTensor& tensor, const RowReader& reader) {
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
    tensor.note =
        "not exact: " + tensor.from.str() + " quantised again to " + std::to_string(bits) + " bits";
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
  for (const WrittenType& type : kWritten) {
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

// Way and size, once the storage is settled.
Status ConversionPlanner::settle(OutputTensor& tensor) {
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
    constexpr GgmlType kGiven[] = {GgmlType::q4_1, GgmlType::q5_1, GgmlType::q4_k, GgmlType::q5_k};
    if (std::find(std::begin(kGiven), std::end(kGiven), tensor.to.type) == std::end(kGiven))
      tensor.note += std::string(tensor.note.empty() ? "" : "; ") + "by " +
                     info(tensor.to.type).name +
                     "'s own rule: --method is for Q4_1, Q5_1, Q4_K and Q5_K";
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

}  // namespace bittern
