#include "formats/checkpoint.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <limits>
#include <new>
#include <numeric>
#include <system_error>

#include "bittern/affine_desc.h"
#include "formats/fingerprint.h"
#include "formats/json_events.h"
#include "formats/quantization_config.h"
#include "formats/side_file.h"

namespace bittern {
namespace {

namespace fs = std::filesystem;
using Method = QuantizationConfig::Method;
using Layout = CheckpointTensor::Layout;

constexpr std::size_t kMostOtherFiles = 4096;
constexpr std::size_t kMostRefBytes = 256;

std::string tensor_in(const std::string& where, std::string_view name) {
  return where + ": tensor " + in_quotes(name) + ": ";
}

std::string with_slash(const std::string& folder) {
  return folder.empty() || folder.back() == '/' ? folder : folder + "/";
}

constexpr std::pair<GgmlType, SafeDType> kPlainTypes[] = {
    {GgmlType::f32, SafeDType::f32},   {GgmlType::f16, SafeDType::f16},
    {GgmlType::bf16, SafeDType::bf16}, {GgmlType::f64, SafeDType::f64},
    {GgmlType::i8, SafeDType::i8},     {GgmlType::i16, SafeDType::i16},
    {GgmlType::i32, SafeDType::i32},   {GgmlType::i64, SafeDType::i64}};

}  // namespace

Storage storage_of(GgmlType type) {
  for (const auto& [plain, dtype] : kPlainTypes)
    if (plain == type) return Storage::plain(dtype);
  return Storage::blocks(type);
}

std::optional<GgmlType> ggml_type_of(const Storage& storage) {
  if (storage.kind == Storage::Kind::blocks) return storage.type;
  if (storage.kind == Storage::Kind::affine) return std::nullopt;
  for (const auto& [plain, dtype] : kPlainTypes)
    if (dtype == storage.dtype) return plain;
  return std::nullopt;
}

// ---- Storage ----

std::string Storage::str() const {
  switch (kind) {
    case Kind::plain: return name(dtype);
    case Kind::blocks: return info(type).name;
    case Kind::affine: break;
  }
  return std::to_string(bits) + " bit, group " + std::to_string(group) + ", " + name(dtype);
}

Result<std::uint64_t> Storage::bytes(const Shape& shape) const {
  if (kind == Kind::blocks) return ggml_bytes(type, shape);
  std::uint64_t elements = 1;
  bool empty = false, fits = true;
  for (int i = 0; i < shape.rank; ++i) {
    if (shape[i] < 0)
      return invalid("dimension " + std::to_string(shape[i]) + ", expected at least 0");
    empty |= shape[i] == 0;
    const auto n = static_cast<std::uint64_t>(std::max<std::int64_t>(shape[i], 1));
    fits &= !__builtin_mul_overflow(elements, n, &elements);
  }
  const std::int64_t columns = shape.rank == 0 ? 1 : shape[shape.rank - 1];
  if (kind == Kind::affine) {
    if (bits < 1 || bits > 8 || group < 1 || !is_float(dtype))
      return invalid(str() + ", expected 1..8 bits, a group of at least 1 and F32, F16 or BF16");
    if (columns % group != 0) {
      return invalid("row of " + std::to_string(columns) + " in groups of " +
                     std::to_string(group) + ", expected a multiple");
    }
  }
  // An element has at most 13 bytes: a code's word, a scale and a bias of its own.
  if (!fits || elements >> (empty ? 63 : 57) != 0)
    return invalid("shape " + shape.str() + " of " + str() + ", expected fewer than 2^57 elements");
  if (empty) return std::uint64_t{0};
  const auto element_bits = static_cast<std::uint64_t>(bits_of(dtype));
  if (kind == Kind::plain) {
    if (elements * element_bits % 8 != 0)
      return invalid("shape " + shape.str() + " of " + str() + ", expected whole bytes");
    return elements * element_bits / 8;
  }
  const std::uint64_t rows = elements / static_cast<std::uint64_t>(columns);
  const auto words = static_cast<std::uint64_t>(packed_words(columns, bits));
  const auto groups = static_cast<std::uint64_t>(columns / group);
  return rows * (4 * words + 2 * groups * element_bits / 8);
}

// ---- the tensors of safetensors files ----

namespace {

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
// .scales, .qzeros and perhaps .g_idx of AWQ and GPTQ.
struct Parts {
  std::string module;  // X
  std::optional<std::size_t> codes, scales, biases, group_index;
};

struct Suffixes {
  std::string_view codes, scales, biases, group_index;
};
Suffixes suffixes_of(Method method) {
  if (method == Method::mlx) return {".weight", ".scales", ".biases", ""};
  return {".qweight", ".scales", ".qzeros", ".g_idx"};
}

// Of the affine tensor that tensor i is a part of; nothing when it is a tensor of its own.
template <class Source>
std::optional<Parts> parts_of(const Source& source, std::size_t i, Method method) {
  const std::string_view name = source.tensor(i).name;
  const Suffixes suffixes = suffixes_of(method);
  Parts parts;
  for (const auto suffix :
       {suffixes.codes, suffixes.scales, suffixes.biases, suffixes.group_index}) {
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

Status too_many(const std::string& where) {
  return invalid(where + ": more than " + std::to_string(kCheckpointMostTensors) +
                 " tensors, expected fewer");
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
      if (!parts || (!whole && (!parts->scales || !parts->biases))) continue;
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
    const Suffixes suffixes = suffixes_of(method);
    for (const auto& [part, suffix] :
         {std::pair(parts.scales, suffixes.scales), std::pair(parts.biases, suffixes.biases)}) {
      if (part) continue;
      return invalid(tensor_in(path_, stored.name) + "no " +
                     in_quotes(parts.module + std::string(suffix)) + ", expected one");
    }
    const SafetensorsTensor& scales = source.tensor(*parts.scales);
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
    if (auto size = tensor.storage.bytes(tensor.shape); !size)
      return invalid(tensor_in(path_, stored.name) + std::string(size.status().message()));
    tensors_.push_back(std::move(tensor));
  }
  return {};
}

// ---- opening ----

Status Checkpoint::open_gguf() {
  kind_ = Kind::gguf;
  auto file = GgufFile::open(path_);
  if (!file) return file.status();
  gguf_ = std::move(*file);
  tensors_.reserve(gguf_->tensors().size());
  for (const GgufTensor& stored : gguf_->tensors()) {
    CheckpointTensor tensor;
    tensor.name = stored.name;
    tensor.shape = stored.shape;
    tensor.storage = storage_of(stored.type);
    tensor.data = stored.bytes;
    tensors_.push_back(std::move(tensor));
  }
  return {};
}

Status Checkpoint::read_config(const std::string& folder) {
  config_path_ = with_slash(folder) + "config.json";
  if (!is_there(config_path_)) return {};
  BITTERN_TRY(check_side_file(config_path_));
  const auto text = MappedFile::open(config_path_);
  if (!text) return text.status();
  auto config = parse_json_tree(config_path_, text->bytes());
  if (!config) return config.status();
  if (!config->is_object()) return invalid(config_path_ + ": not an object, expected one");
  config_ = std::move(*config);
  return {};
}

Status Checkpoint::open_file() {
  kind_ = Kind::safetensors;
  auto file = SafetensorsFile::open(path_);
  if (!file) return file.status();
  file_ = std::move(*file);
  BITTERN_TRY(read_config(fs::path(path_).parent_path().string()));
  return take_tensors(FileSource{*file_}, false);
}

namespace {

// models--org--name/{refs/main, snapshots/<commit>/}: the folder of the commit.
Result<std::string> snapshot_of(const std::string& folder) {
  const std::string beside = with_slash(folder);
  if (!is_there(beside + "snapshots")) return folder;
  const auto ref = MappedFile::open(beside + "refs/main");
  if (!ref) {
    return Status(ref.status().code(), std::string(ref.status().message()) +
                                           ", expected the name of a folder in snapshots");
  }
  std::string_view commit(reinterpret_cast<const char*>(ref->bytes().data()), ref->bytes().size());
  while (!commit.empty() && (commit.back() == '\n' || commit.back() == '\r'))
    commit.remove_suffix(1);
  if (commit.empty() || commit.size() > kMostRefBytes || commit == "." || commit == ".." ||
      commit.find_first_of(std::string_view("/\\\0", 3)) != std::string_view::npos) {
    return invalid(ref->path() + ": " + in_quotes(commit) +
                   ", expected the name of a folder in snapshots");
  }
  return beside + "snapshots/" + std::string(commit);
}

// Without this, files that cannot be seen would be called missing.
Status check_readable(const std::string& folder) {
  if (::access(folder.c_str(), R_OK | X_OK) == 0 || errno == ENOENT || errno == ENOTDIR) return {};
  return unavailable(folder +
                     ": the folder cannot be read: " + std::generic_category().message(errno));
}

// What a conversion copies: texts about the model, no weights, nothing of how they are packed.
bool goes_through(std::string_view name) {
  for (const std::string_view about_weights :
       {"config.json", "quantize_config.json", "quant_config.json", "hf_quant_config.json",
        "quantization_config.json"})
    if (name == about_weights) return false;
  for (const std::string_view weights : {".index.json", ".safetensors", ".gguf"})
    if (name.ends_with(weights)) return false;
  for (const std::string_view suffix :
       {".json", ".jinja", ".model", ".txt", ".md", ".tiktoken", ".py"})
    if (name.ends_with(suffix)) return true;
  for (const std::string_view prefix : {"LICENSE", "NOTICE", "vocab"})
    if (name.starts_with(prefix)) return true;
  return false;
}

// A folder without safetensors is often one of GGUF files, of which one is to be chosen.
Status with_hint(const std::string& folder, const Status& status) {
  if (status.code() != Code::unavailable) return status;
  std::string least;
  std::error_code error;
  for (fs::directory_iterator file(folder, error), end; !error && file != end;
       file.increment(error)) {
    std::string name = file->path().filename().string();
    if (name.ends_with(".gguf") && (least.empty() || name < least)) least = std::move(name);
  }
  if (least.empty()) return status;
  return unavailable(std::string(status.message()) + " (or a file of it: " + least + ")");
}

}  // namespace

Status Checkpoint::list_other_files() {
  std::error_code error;
  std::vector<std::string> no_files;  // pipes, sockets, folders with the name of a file
  for (fs::directory_iterator file(path_, error), end; !error && file != end;
       file.increment(error)) {
    std::string name = file->path().filename().string();
    std::error_code unknown;
    if (!goes_through(name)) continue;
    if (other_files_.size() + left_out_.size() + no_files.size() == kMostOtherFiles) {
      return invalid(path_ + ": more than " + std::to_string(kMostOtherFiles) +
                     " files beside the weights, expected fewer");
    }
    if (const Status status = check_side_file(file->path().string()); !status.ok()) {
      left_out_.emplace_back(status.message());
    } else if (file->is_regular_file(unknown)) {
      other_files_.push_back(std::move(name));
    } else {
      no_files.push_back(std::move(name));
    }
  }
  if (error) return unavailable(path_ + ": cannot list: " + error.message());
  if (!no_files.empty()) {
    std::sort(no_files.begin(), no_files.end());
    std::string& text = left_out_.emplace_back(path_ + ": ");
    for (std::size_t i = 0; i < no_files.size(); ++i)
      text.append(i == 0 ? "" : ", ").append(in_quotes(no_files[i]));
    text += ": not regular files";
  }
  std::sort(other_files_.begin(), other_files_.end());
  std::sort(left_out_.begin(), left_out_.end());
  return {};
}

void Checkpoint::list_not_read() {
  const auto some = [](const std::string& first, std::size_t count) {
    return in_quotes(first) + (count == 1 ? "" : " and " + std::to_string(count - 1) + " more");
  };
  std::string least;
  std::size_t count = 0;
  for (const SafetensorsFile& file : folder_->files()) {
    for (const SafetensorsTensor& tensor : file.tensors()) {
      if (folder_->find(tensor.name)) continue;
      if (count++ == 0 || tensor.name < least) least = tensor.name;
    }
  }
  if (count > 0) not_read_.push_back("tensors that the index does not list: " + some(least, count));
  count = 0;
  std::error_code error;
  for (fs::directory_iterator file(path_, error), end; !error && file != end;
       file.increment(error)) {
    const std::string name = file->path().filename().string();
    const auto is_it = [&](const SafetensorsFile& read) {
      return fs::path(read.path()).filename() == file->path().filename();
    };
    if (!name.ends_with(".safetensors") ||
        std::any_of(folder_->files().begin(), folder_->files().end(), is_it))
      continue;
    if (count++ == 0 || name < least) least = name;
  }
  if (count > 0) not_read_.push_back("files that are not of the model: " + some(least, count));
}

Status Checkpoint::open_folder() {
  kind_ = Kind::hf;
  BITTERN_TRY(check_readable(path_));
  auto snapshot = snapshot_of(path_);
  if (!snapshot) return snapshot.status();
  path_ = std::move(*snapshot);
  BITTERN_TRY(check_readable(path_));
  auto folder = SafetensorsFolder::open(path_);
  if (!folder) return with_hint(path_, folder.status());
  folder_ = std::move(*folder);
  for (const SafetensorsFile& file : folder_->files())
    for (const auto& [key, value] : file.metadata())
      if (key == "format" && value == "mlx") kind_ = Kind::mlx;
  BITTERN_TRY(read_config(path_));
  BITTERN_TRY(take_tensors(FolderSource{*folder_}, true));
  list_not_read();
  return list_other_files();
}

Status Checkpoint::index_tensors() {
  by_name_.resize(tensors_.size());
  std::iota(by_name_.begin(), by_name_.end(), 0u);
  std::sort(by_name_.begin(), by_name_.end(),
            [&](auto a, auto b) { return tensors_[a].name < tensors_[b].name; });
  // X.weight beside X.qweight
  const auto twice = std::adjacent_find(by_name_.begin(), by_name_.end(), [&](auto a, auto b) {
    return tensors_[a].name == tensors_[b].name;
  });
  if (twice == by_name_.end()) return {};
  return invalid(tensor_in(path_, tensors_[*twice].name) + "plain and packed, expected one");
}

const CheckpointTensor* Checkpoint::find(std::string_view name) const {
  const auto at =
      std::lower_bound(by_name_.begin(), by_name_.end(), name,
                       [&](std::uint32_t i, std::string_view n) { return tensors_[i].name < n; });
  return at != by_name_.end() && tensors_[*at].name == name ? &tensors_[*at] : nullptr;
}

std::vector<std::string> Checkpoint::files() const {
  std::vector<std::string> files;
  if (gguf_)
    for (const MappedFile& part : gguf_->parts()) files.push_back(part.path());
  if (file_) files.push_back(file_->path());
  if (!config_.is_null()) files.push_back(config_path_);
  if (!folder_) return files;
  files.push_back(given_);
  files.push_back(path_);
  for (const SafetensorsFile& file : folder_->files()) files.push_back(file.path());
  const std::string index = with_slash(path_) + "model.safetensors.index.json";
  if (is_there(index)) files.push_back(index);
  for (const std::string& other : other_files_) files.push_back(with_slash(path_) + other);
  return files;
}

Status Checkpoint::unchanged() const {
  if (gguf_)
    for (const MappedFile& part : gguf_->parts()) BITTERN_TRY(part.unchanged());
  if (file_) BITTERN_TRY(file_->unchanged());
  if (folder_)
    for (const SafetensorsFile& file : folder_->files()) BITTERN_TRY(file.unchanged());
  for (const auto& [path, stamp] : stamps_) BITTERN_TRY(stamp.check(path));
  return {};
}

// ---- the fingerprint ----

namespace {

// Name, size and time of a file.
void add_file(const std::string& path, const FileStamp& stamp, Fingerprint& to) {
  to.add(fs::path(path).filename().string());
  to.add(stamp.size);
  to.add(static_cast<std::uint64_t>(stamp.seconds));
  to.add(static_cast<std::uint64_t>(stamp.nanoseconds));
}

}  // namespace

Status Checkpoint::take_fingerprint() {
  Fingerprint hash;
  // A header is what lies before the first tensor's bytes.
  if (gguf_) {
    const auto parts = gguf_->parts();
    std::vector<std::size_t> header;
    for (const MappedFile& part : parts) header.push_back(part.bytes().size());
    for (const GgufTensor& tensor : gguf_->tensors()) {
      if (tensor.bytes.empty()) continue;
      const auto at = tensor.bytes.data() - parts[tensor.part].bytes().data();
      header[tensor.part] = std::min(header[tensor.part], static_cast<std::size_t>(at));
    }
    for (std::size_t i = 0; i < parts.size(); ++i) {
      add_file(parts[i].path(), parts[i].stamp(), hash);
      hash.add(parts[i].bytes().first(header[i]));
    }
  }
  const auto add_safetensors = [&](const SafetensorsFile& file) -> Status {
    add_file(file.path(), file.stamp(), hash);
    const auto mapped = MappedFile::open(file.path());
    if (!mapped) return mapped.status();
    const auto header = file.tensors().empty() ? mapped->bytes().size() : file.tensors()[0].begin;
    hash.add(mapped->bytes().first(std::min<std::size_t>(header, mapped->bytes().size())));
    return {};
  };
  if (file_) BITTERN_TRY(add_safetensors(*file_));
  if (folder_) {
    for (const SafetensorsFile& file : folder_->files()) BITTERN_TRY(add_safetensors(file));
  }
  const auto add_unmapped = [&](const std::string& path) -> Status {
    const auto stamp = FileStamp::of(path);
    if (!stamp) return stamp.status();
    stamps_.emplace_back(path, *stamp);
    add_file(path, *stamp, hash);
    return {};
  };
  for (const std::string& other : other_files_)
    BITTERN_TRY(add_unmapped(with_slash(path_) + other));
  if (!config_.is_null()) BITTERN_TRY(add_unmapped(config_path_));
  fingerprint_ = hash.value();
  return {};
}

std::uint64_t Checkpoint::stamp() const {
  Fingerprint hash;
  const auto add = [&](const FileStamp& stamp) {
    hash.add(stamp.inode);
    hash.add(static_cast<std::uint64_t>(stamp.touched_seconds));
    hash.add(static_cast<std::uint64_t>(stamp.touched_nanoseconds));
  };
  if (gguf_)
    for (const MappedFile& part : gguf_->parts()) add(part.stamp());
  if (file_) add(file_->stamp());
  if (folder_)
    for (const SafetensorsFile& file : folder_->files()) add(file.stamp());
  return hash.value();
}

Result<Checkpoint> Checkpoint::open(const std::string& path) {
  try {
    Checkpoint model;
    model.path_ = model.given_ = path;
    std::error_code error;
    if (fs::is_directory(path, error)) {
      if (Status status = model.open_folder(); !status.ok()) return status;
    } else {
      const auto file = MappedFile::open(path);
      if (!file) return file.status();
      const std::string_view start(reinterpret_cast<const char*>(file->bytes().data()),
                                   std::min<std::size_t>(file->bytes().size(), 9));
      const bool gguf = path.ends_with(".gguf") || start.starts_with("GGUF");
      if (!gguf && !path.ends_with(".safetensors") && (start.size() < 9 || start[8] != '{')) {
        return unsupported(path + ": starts with " + in_quotes(start.substr(0, 4)) +
                           ", expected a GGUF or safetensors file or a folder");
      }
      if (Status status = gguf ? model.open_gguf() : model.open_file(); !status.ok()) return status;
    }
    if (Status status = model.index_tensors(); !status.ok()) return status;
    if (Status status = model.take_fingerprint(); !status.ok()) return status;
    return model;
  } catch (const std::bad_alloc&) {
    return Status(Code::out_of_memory, path + ": out of memory");
  }
}

}  // namespace bittern
