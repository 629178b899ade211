#include "formats/checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <numeric>
#include <system_error>

#include "core/guarded.h"
#include "formats/fingerprint.h"
#include "formats/json_events.h"
#include "formats/side_file.h"

namespace bittern {
namespace fs = std::filesystem;

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
  return take_tensors(*file_);
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
  } catch (...) {
    return caught(path);
  }
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

void Checkpoint::replace_grid(std::string_view name, std::span<const std::byte> codes,
                              std::span<const std::byte> scales,
                              std::span<const std::byte> biases) {
  if (const CheckpointTensor* const found = find(name)) {
    CheckpointTensor& tensor = tensors_[static_cast<std::size_t>(found - tensors_.data())];
    if (!codes.empty()) tensor.data = codes;
    tensor.scales = scales;
    tensor.biases = biases;
  }
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

}  // namespace bittern
