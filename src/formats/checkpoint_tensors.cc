// The tensors of safetensors files: most are plain numbers, some are codes with their scales and
// biases in other tensors.
#include <algorithm>
#include <cstring>
#include <limits>

#include "core/guarded.h"
#include "formats/checkpoint.h"
#include "formats/json_events.h"
#include "formats/quantization_config.h"

namespace bittern {
namespace {

using Method = QuantizationConfig::Method;
using Layout = CheckpointTensor::Layout;

// What take_tensors needs of a folder or of one file.
struct FolderSource {
  const SafetensorsFolder& folder;
  std::size_t size() const { return folder.size(); }
  const SafetensorsTensor& tensor(std::size_t i) const { return folder.tensor(i); }
  std::span<const std::byte> bytes(std::size_t i) const { return folder.bytes(i); }
  std::optional<std::size_t> find(std::string_view name) const { return folder.find(name); }
};
struct FileSource {
  const SafetensorsFile& file;
  std::size_t size() const { return file.tensors().size(); }
  const SafetensorsTensor& tensor(std::size_t i) const { return file.tensors()[i]; }
  std::span<const std::byte> bytes(std::size_t i) const { return file.bytes(file.tensors()[i]); }
  std::optional<std::size_t> find(std::string_view name) const {
    const SafetensorsTensor* found = file.find(name);
    if (found == nullptr) return std::nullopt;
    return static_cast<std::size_t>(found - file.tensors().data());
  }
};

Result<Shape> shape_of(const std::string& tensor, const SafetensorsSpec& spec) {
  if (spec.shape.size() > std::size_t{kMaxRank}) {
    return unsupported(tensor + "rank " + std::to_string(spec.shape.size()) +
                       ", expected at most " + std::to_string(kMaxRank));
  }
  Shape shape;
  for (const std::uint64_t n : spec.shape) {
    if (n > std::uint64_t{std::numeric_limits<std::int64_t>::max()})
      return invalid(tensor + "dimension " + std::to_string(n) + ", expected less than 2^63");
    shape[shape.rank++] = static_cast<std::int64_t>(n);
  }
  return shape;
}

std::string described(const SafetensorsSpec& spec) {
  std::string text = in_quotes(spec.name) + " " + name(spec.dtype) + " [";
  for (std::size_t i = 0; i < spec.shape.size(); ++i)
    text.append(i == 0 ? "" : ",").append(std::to_string(spec.shape[i]));
  return text + "]";
}

// The stored tensors that are one affine tensor: X.weight, .scales, .biases of MLX; X.qweight,
// .scales, .qzeros and perhaps .g_idx of AWQ and GPTQ; X.weight_packed, .weight_scale,
// .weight_zero_point unless all are the same, .weight_shape of compressed-tensors.
struct Parts {
  std::string module;  // X
  std::optional<std::size_t> codes, scales, biases, group_index, shape;
};

struct Suffixes {
  std::string_view codes, scales, biases, group_index, shape;
};
Suffixes suffixes_of(Method method) {
  if (method == Method::mlx) return {".weight", ".scales", ".biases", "", ""};
  if (method == Method::compressed)
    return {".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_g_idx",
            ".weight_shape"};
  return {".qweight", ".scales", ".qzeros", ".g_idx", ""};
}

// Of the affine tensor that tensor i is a part of; nothing when it is a tensor of its own.
template <class Source>
std::optional<Parts> parts_of(const Source& source, std::size_t i, Method method) {
  const std::string_view name = source.tensor(i).name;
  const Suffixes suffixes = suffixes_of(method);
  Parts parts;
  for (const auto suffix :
       {suffixes.codes, suffixes.scales, suffixes.biases, suffixes.group_index, suffixes.shape}) {
    if (suffix.empty() || !name.ends_with(suffix)) continue;
    parts.module = name.substr(0, name.size() - suffix.size());
    const auto part = [&](std::string_view of) -> std::optional<std::size_t> {
      if (of.empty()) return std::nullopt;
      return source.find(parts.module + std::string(of));
    };
    parts.codes = part(suffixes.codes);
    parts.scales = part(suffixes.scales);
    parts.biases = part(suffixes.biases);
    parts.group_index = part(suffixes.group_index);
    parts.shape = part(suffixes.shape);
    if (!parts.codes) return std::nullopt;
    // An MLX weight is packed only beside scales; an ordinary one has none.
    if (method == Method::mlx &&
        (source.tensor(*parts.codes).dtype != SafeDType::u32 || (!parts.scales && !parts.biases)))
      return std::nullopt;
    return parts;
  }
  return std::nullopt;
}

// The logical shape of an MLX tensor, once its three parts and the config agree.
Result<Shape> mlx_shape(const std::string& where, const Storage& storage,
                        const SafetensorsSpec& codes, const SafetensorsSpec& scales,
                        const SafetensorsSpec& biases) {
  const std::string tensor = tensor_in(where, codes.name);
  auto shape = shape_of(tensor, codes);
  if (!shape) return shape.status();
  const auto refuse = [&](const std::string& what) {
    return invalid(tensor + described(codes) + " with " + described(scales) + ", expected " + what);
  };
  if (shape->rank < 2 || scales.shape.size() != codes.shape.size() ||
      !std::equal(codes.shape.begin(), codes.shape.end() - 1, scales.shape.begin()))
    return refuse("one row of scales for each row of codes");
  const auto bits = static_cast<std::uint64_t>(storage.bits);
  const std::uint64_t words = codes.shape.back();
  if (words > std::uint64_t{1} << 56 || words * 32 % bits != 0)
    return refuse("rows of whole codes of " + std::to_string(bits) + " bits");
  const std::uint64_t columns = words * 32 / bits;
  const auto group = static_cast<std::uint64_t>(storage.group);
  if (columns % group != 0 || scales.shape.back() != columns / group) {
    return refuse("rows of " + std::to_string(words) + " words to be " + std::to_string(columns) +
                  " codes of " + std::to_string(bits) + " bits in groups of " +
                  std::to_string(group) + ", as config.json says, with a scale each");
  }
  if (!is_float(scales.dtype)) return refuse("scales of F32, F16 or BF16");
  if (biases.shape != scales.shape || biases.dtype != scales.dtype) {
    return invalid(tensor + described(biases) + " with " + described(scales) +
                   ", expected both alike");
  }
  (*shape)[shape->rank - 1] = static_cast<std::int64_t>(columns);
  return shape;
}

// The same for AWQ and GPTQ, which keep a weight [rows, columns] as [columns, rows].
Result<Shape> columns_shape(const std::string& where, Method method, Storage& storage,
                            const SafetensorsSpec& codes, const SafetensorsSpec& scales,
                            const SafetensorsSpec& zeros, const SafetensorsSpec* group_index) {
  const std::string tensor = tensor_in(where, codes.name);
  const auto is_word = [](const SafetensorsSpec& spec) {
    return spec.dtype == SafeDType::i32 || spec.dtype == SafeDType::u32;
  };
  const auto refuse = [&](const SafetensorsSpec& spec, const std::string& what) {
    return invalid(tensor + described(spec) + ", expected " + what);
  };
  if (!is_word(codes) || codes.shape.size() != 2) return refuse(codes, "a matrix of I32");
  if (!is_float(scales.dtype) || scales.shape.size() != 2)
    return refuse(scales, "a matrix of F32, F16 or BF16");
  const auto bits = static_cast<std::uint64_t>(storage.bits);
  const bool awq = method == Method::awq;
  const std::uint64_t packed = codes.shape[awq ? 1 : 0];
  if (packed > std::uint64_t{1} << 31 || codes.shape[awq ? 0 : 1] > std::uint64_t{1} << 31)
    return refuse(codes, "fewer than 2^31 rows and columns");
  if (packed * 32 % bits != 0)
    return refuse(codes, "whole codes of " + std::to_string(bits) + " bits");
  const std::uint64_t rows = awq ? packed * 32 / bits : codes.shape[1];
  const std::uint64_t columns = awq ? codes.shape[0] : packed * 32 / bits;
  if (columns == 0 || columns > std::uint64_t{std::numeric_limits<int>::max()})
    return refuse(codes, "at least one and fewer than 2^31 columns");
  if (storage.group == -1) storage.group = static_cast<int>(columns);
  const auto group = static_cast<std::uint64_t>(storage.group);
  if (columns % group != 0) {
    return unsupported(tensor + std::to_string(columns) + " columns in groups of " +
                       std::to_string(group) + ", expected a multiple");
  }
  const std::uint64_t groups = columns / group;
  if (scales.shape[0] != groups || scales.shape[1] != rows) {
    return refuse(scales, "[" + std::to_string(groups) + "," + std::to_string(rows) + "] for " +
                              described(codes) + " in groups of " + std::to_string(group));
  }
  if (!is_word(zeros) || zeros.shape.size() != 2 || rows * bits % 32 != 0 ||
      zeros.shape[0] != groups || zeros.shape[1] != rows * bits / 32) {
    return refuse(zeros, std::to_string(bits) + " bit zero points in I32 for " + described(scales));
  }
  if (group_index != nullptr &&
      (!is_word(*group_index) || group_index->shape != std::vector<std::uint64_t>{columns}))
    return refuse(*group_index, "I32 [" + std::to_string(columns) + "]");
  return Shape{static_cast<std::int64_t>(rows), static_cast<std::int64_t>(columns)};
}

// Of compressed-tensors: the shape, and which of the settings the stored shapes are of. `shape`
// holds it once more: words of codes do not tell how many columns there are.
struct Compressed {
  Shape shape;
  QuantizationConfig::Module module;
};
Result<Compressed> compressed_shape(const std::string& where, const QuantizationConfig& config,
                                    const SafetensorsSpec& codes, const SafetensorsSpec& scales,
                                    const SafetensorsSpec* zeros, const SafetensorsSpec& shape,
                                    std::span<const std::byte> shape_bytes) {
  const std::string tensor = tensor_in(where, codes.name);
  const auto refuse = [&](const SafetensorsSpec& spec, const std::string& what) {
    return invalid(tensor + described(spec) + ", expected " + what);
  };
  if (codes.dtype != SafeDType::i32 || codes.shape.size() != 2)
    return refuse(codes, "a matrix of I32");
  if (!is_float(scales.dtype) || scales.shape.size() != 2)
    return refuse(scales, "a matrix of F32, F16 or BF16");
  if (shape.dtype != SafeDType::i64 || shape.shape != std::vector<std::uint64_t>{2} ||
      shape_bytes.size() != 2 * sizeof(std::int64_t))
    return refuse(shape, "I64 [2]");
  std::int64_t said[2];
  std::memcpy(said, shape_bytes.data(), sizeof said);
  const std::string text = "[" + std::to_string(said[0]) + "," + std::to_string(said[1]) + "]";
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (said[0] < 1 || said[0] > kMost || said[1] < 1 || said[1] > kMost)
    return invalid(tensor + in_quotes(shape.name) + " holds " + text +
                   ", expected rows and columns of 1 to 2^31 - 1");
  const auto rows = static_cast<std::uint64_t>(said[0]),
             columns = static_cast<std::uint64_t>(said[1]);
  const auto words = [](std::uint64_t count, int bits) {
    return (count * static_cast<std::uint64_t>(bits) + 31) / 32;
  };
  std::string settings;
  for (QuantizationConfig::Module module : config.choices) {
    if (module.group == -1) module.group = said[1];
    const auto group = static_cast<std::uint64_t>(module.group);
    settings += (settings.empty() ? "" : " or ") + std::to_string(module.bits) +
                " bits in groups of " + std::to_string(group) +
                (module.zero_points ? "" : ", symmetric");
    if (columns % group != 0 || module.zero_points != (zeros != nullptr) ||
        codes.shape != std::vector<std::uint64_t>{rows, words(columns, module.bits)} ||
        scales.shape != std::vector<std::uint64_t>{rows, columns / group})
      continue;
    if (zeros != nullptr &&
        (zeros->dtype != SafeDType::i32 ||
         zeros->shape != std::vector<std::uint64_t>{words(rows, module.bits), columns / group}))
      return refuse(*zeros, "I32 [" + std::to_string(words(rows, module.bits)) + "," +
                                std::to_string(columns / group) + "]: zero points of " +
                                std::to_string(module.bits) + " bits, packed down the rows");
    return Compressed{{said[0], said[1]}, module};
  }
  return invalid(tensor + described(codes) + " with " + described(scales) +
                 (zeros == nullptr ? " without zero points" : " and " + described(*zeros)) +
                 " for a weight " + text + ", expected " + settings + ", as config.json says");
}

Status too_many(const std::string& where) {
  return invalid(where + ": more than " + std::to_string(kCheckpointMostTensors) +
                 " tensors, expected fewer");
}

// The name of a part that is not there and must be; empty: all are. Where some modules of
// compressed-tensors have no zero points, compressed_shape tells whether this one has.
std::string missing_part(const Parts& parts, const QuantizationConfig& config) {
  const Suffixes suffixes = suffixes_of(config.method);
  const bool all_zeros = std::all_of(config.choices.begin(), config.choices.end(),
                                     [](const auto& module) { return module.zero_points; });
  if (!parts.scales) return parts.module + std::string(suffixes.scales);
  if (!parts.biases && all_zeros) return parts.module + std::string(suffixes.biases);
  if (!parts.shape && !suffixes.shape.empty()) return parts.module + std::string(suffixes.shape);
  return {};
}

}  // namespace

// `whole`: every tensor of the model is in the source, so that a missing part is an error.
template <class Source>
Status Checkpoint::take_tensors(const Source& source, bool whole) {
  const auto quantization = read_quantization_config(config_path_, config_);
  if (!quantization) return quantization.status();
  const Method method = quantization->method;
  if (kind_ == Kind::hf && method == Method::mlx) kind_ = Kind::mlx;

  std::vector<std::uint8_t> own(source.size(), 1);  // 2: codes, 0: what goes with them
  if (method != Method::none) {
    for (std::size_t i = 0; i < source.size(); ++i) {
      const auto parts = parts_of(source, i, method);
      if (!parts || (!whole && !missing_part(*parts, *quantization).empty())) continue;
      own[i] = i == *parts->codes ? 2 : 0;
    }
  }
  const auto count = static_cast<std::size_t>(
      std::count_if(own.begin(), own.end(), [](std::uint8_t kind) { return kind != 0; }));
  if (count > kCheckpointMostTensors) return too_many(path_);
  tensors_.reserve(count);
  for (std::size_t i = 0; i < source.size(); ++i) {
    if (own[i] == 0) continue;
    const SafetensorsTensor& stored = source.tensor(i);
    CheckpointTensor tensor;
    tensor.data = source.bytes(i);
    if (own[i] == 1) {
      auto shape = shape_of(tensor_in(path_, stored.name), stored);
      if (!shape) return shape.status();
      tensor.name = stored.name;
      tensor.shape = *shape;
      tensor.storage = Storage::plain(stored.dtype);
      tensors_.push_back(std::move(tensor));
      continue;
    }
    const Parts parts = *parts_of(source, i, method);
    if (const std::string missing = missing_part(parts, *quantization); !missing.empty())
      return invalid(tensor_in(path_, stored.name) + "no " + in_quotes(missing) + ", expected one");
    const SafetensorsTensor& scales = source.tensor(*parts.scales);
    if (method == Method::compressed) {
      if (parts.group_index)
        return unsupported(tensor_in(path_, stored.name) + "with " +
                           in_quotes(source.tensor(*parts.group_index).name) +
                           ": the columns of a group lie apart, expected side by side");
      const auto read = compressed_shape(path_, *quantization, stored, scales,
                                         parts.biases ? &source.tensor(*parts.biases) : nullptr,
                                         source.tensor(*parts.shape), source.bytes(*parts.shape));
      if (!read) return read.status();
      tensor.name = parts.module + ".weight";
      tensor.shape = read->shape;
      tensor.storage = Storage::affine(read->module.bits, static_cast<int>(read->module.group),
                                       scales.dtype, Storage::Zeros::packed);
      tensor.scales = source.bytes(*parts.scales);
      if (parts.biases) tensor.biases = source.bytes(*parts.biases);
      tensors_.push_back(std::move(tensor));
      continue;
    }
    const SafetensorsTensor& biases = source.tensor(*parts.biases);
    QuantizationConfig::Module module = quantization->all;
    if (const auto said = quantization->modules.find(parts.module);
        said != quantization->modules.end()) {
      if (!said->second) {
        return invalid(tensor_in(path_, stored.name) + "packed with " + in_quotes(scales.name) +
                       ", expected plain numbers, as config.json says false of " +
                       in_quotes(parts.module));
      }
      module = *said->second;
    }
    tensor.name = parts.module + ".weight";
    tensor.storage = Storage::affine(module.bits, static_cast<int>(module.group), scales.dtype);
    tensor.scales = source.bytes(*parts.scales);
    tensor.biases = source.bytes(*parts.biases);
    if (parts.group_index) tensor.group_index = source.bytes(*parts.group_index);
    const SafetensorsTensor* group_index =
        parts.group_index ? &source.tensor(*parts.group_index) : nullptr;
    tensor.layout = method == Method::mlx           ? Layout::rows
                    : method == Method::awq         ? Layout::awq
                    : quantization->zeros_minus_one ? Layout::gptq
                                                    : Layout::gptq_v2;
    auto shape = method == Method::mlx ? mlx_shape(path_, tensor.storage, stored, scales, biases)
                                       : columns_shape(path_, method, tensor.storage, stored,
                                                       scales, biases, group_index);
    if (!shape) return shape.status();
    tensor.shape = *shape;
    const auto size = tensor.storage.bytes(tensor.shape);
    throw_if_out_of_memory(size.status());
    if (!size) return invalid(tensor_in(path_, stored.name) + std::string(size.status().message()));
    tensors_.push_back(std::move(tensor));
  }
  return {};
}

Status Checkpoint::take_tensors(const SafetensorsFile& file) {
  return take_tensors(FileSource{file}, false);
}

Status Checkpoint::take_tensors(const SafetensorsFolder& folder) {
  return take_tensors(FolderSource{folder}, true);
}

}  // namespace bittern
