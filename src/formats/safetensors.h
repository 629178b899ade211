// safetensors: a file is
//     u64 n, little endian | n bytes of JSON, padded with spaces | the tensors' bytes, gapless
// and the JSON maps each tensor's name to {"dtype", "shape", "data_offsets": [begin, end)}, and
// "__metadata__" to an object of strings. A folder holds one model.safetensors, or shards and a
// model.safetensors.index.json whose "weight_map" says which tensor is in which shard.
// Data are mapped for reading and streamed for writing: memory grows only with the number of
// tensors.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bittern/status.h"
#include "formats/mapped_file.h"
#include "formats/safe_dtype.h"

namespace bittern {

// Limits for headers that are not trusted: memory is below 64 MiB + twice the file's size.
inline constexpr std::uint64_t kSafetensorsMaxHeader = 100'000'000;  // the format's own limit
inline constexpr std::size_t kSafetensorsMaxTensors = std::size_t{1} << 19;
inline constexpr std::size_t kSafetensorsMaxMetadata = std::size_t{1} << 16;
inline constexpr std::size_t kSafetensorsMaxRank = 8;
inline constexpr std::size_t kSafetensorsMaxName = 1024;  // bytes
inline constexpr std::size_t kSafetensorsMaxShards = std::size_t{1} << 14;

// A tensor to be written.
struct SafetensorsSpec {
  std::string name;
  SafeDType dtype = SafeDType::f32;
  std::vector<std::uint64_t> shape;
};

struct SafetensorsTensor : SafetensorsSpec {
  std::uint64_t begin = 0, end = 0;  // bytes of the file, not of its data
};

using SafetensorsMetadata = std::vector<std::pair<std::string, std::string>>;  // keys ascend

struct SafetensorsHeader {
  std::vector<SafetensorsTensor> tensors;  // in the order of their bytes in the file
  std::vector<std::uint32_t> by_name;      // their order by name
  SafetensorsMetadata metadata;

  const SafetensorsTensor* find(std::string_view name) const;
};

// The header of a whole file in memory; error messages begin with `where`.
Result<SafetensorsHeader> parse_safetensors(const std::string& where,
                                            std::span<const std::byte> file);

struct SafetensorsIndex {
  std::vector<std::string> shards;                                // ascending
  std::vector<std::pair<std::string, std::uint32_t>> weight_map;  // tensor, shard; names ascend
};
Result<SafetensorsIndex> parse_safetensors_index(const std::string& where,
                                                 std::span<const std::byte> json);

class SafetensorsFile {
 public:
  static Result<SafetensorsFile> open(const std::string& path);

  const std::string& path() const { return file_.path(); }
  const FileStamp& stamp() const { return file_.stamp(); }
  Status unchanged() const { return file_.unchanged(); }
  const std::vector<SafetensorsTensor>& tensors() const { return header_.tensors; }
  const SafetensorsTensor* find(std::string_view name) const { return header_.find(name); }
  const SafetensorsMetadata& metadata() const { return header_.metadata; }
  // Of one of tensors().
  std::span<const std::byte> bytes(const SafetensorsTensor& tensor) const {
    return file_.bytes().subspan(tensor.begin, tensor.end - tensor.begin);
  }

 private:
  SafetensorsFile(MappedFile file, SafetensorsHeader header)
      : file_(std::move(file)), header_(std::move(header)) {}

  MappedFile file_;
  SafetensorsHeader header_;
};

// If there is an index, it decides: a tensor that it does not name is left out.
class SafetensorsFolder {
 public:
  static Result<SafetensorsFolder> open(const std::string& folder);

  const std::vector<SafetensorsFile>& files() const { return files_; }
  // Tensors are numbered in the order of their bytes, shard by shard.
  std::size_t size() const { return entries_.size(); }
  const SafetensorsFile& file(std::size_t i) const { return files_[entries_[i].file]; }
  const SafetensorsTensor& tensor(std::size_t i) const {
    return file(i).tensors()[entries_[i].tensor];
  }
  std::span<const std::byte> bytes(std::size_t i) const { return file(i).bytes(tensor(i)); }
  std::optional<std::size_t> find(std::string_view name) const;

 private:
  struct Entry {
    std::uint32_t file, tensor;
  };
  SafetensorsFolder() = default;
  void sort_names();

  std::vector<SafetensorsFile> files_;
  std::vector<Entry> entries_;
  std::vector<std::uint32_t> by_name_;
};

}  // namespace bittern
