// safetensors: a file is
//     u64 n, little endian | n bytes of JSON, padded with spaces | the tensors' bytes, gapless
// and the JSON maps each tensor's name to {"dtype", "shape", "data_offsets": [begin, end)}, and
// "__metadata__" to an object of strings. A folder holds one model.safetensors, or shards and a
// model.safetensors.index.json whose "weight_map" says which tensor is in which shard.
// Data are mapped in and streamed out: memory grows with the number of tensors only.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bittern/dtype.h"
#include "bittern/status.h"
#include "formats/mapped_file.h"

namespace bittern {

// In the format's own order, by alignment: a file holds the last ones first.
enum class SafeDType : std::uint8_t {
  boolean,
  f4,
  f6_e2m3,
  f6_e3m2,
  u8,
  i8,
  f8_e5m2,
  f8_e4m3,
  f8_e8m0,
  f8_e4m3fnuz,
  f8_e5m2fnuz,
  i16,
  u16,
  f16,
  bf16,
  i32,
  u32,
  f32,
  c64,
  f64,
  i64,
  u64,
};
inline constexpr int kSafeDTypeCount = 22;

const char* name(SafeDType dtype);  // as the file spells it: "F8_E4M3"
int bits_of(SafeDType dtype);       // of an element: 4 and 6 are packed without gaps
std::optional<SafeDType> find_safe_dtype(std::string_view name);
// Of the three floats weights are computed with.
inline bool is_float(SafeDType dtype) {
  return dtype == SafeDType::f32 || dtype == SafeDType::f16 || dtype == SafeDType::bf16;
}
// The library's own type of the same values, and back.
std::optional<DType> to_dtype(SafeDType dtype);
SafeDType to_safe_dtype(DType dtype);

// What hostile headers are held to, so that memory stays below 64 MiB + twice the file's size.
inline constexpr std::uint64_t kSafetensorsMaxHeader = 100'000'000;  // the format's own limit
inline constexpr std::size_t kSafetensorsMaxTensors = std::size_t{1} << 19;
inline constexpr std::size_t kSafetensorsMaxMetadata = std::size_t{1} << 16;
inline constexpr std::size_t kSafetensorsMaxRank = 8;
inline constexpr std::size_t kSafetensorsMaxName = 1024;  // bytes
inline constexpr std::size_t kSafetensorsMaxShards = std::size_t{1} << 14;

// What a writer is told of a tensor.
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
  std::vector<SafetensorsTensor> tensors;  // as their bytes lie in the file
  std::vector<std::uint32_t> by_name;      // their order by name
  SafetensorsMetadata metadata;

  const SafetensorsTensor* find(std::string_view name) const;
};

// The header of a whole file in memory; `where` opens the error messages.
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

// The index decides where there is one: a tensor it does not name is left out, and counted.
class SafetensorsFolder {
 public:
  static Result<SafetensorsFolder> open(const std::string& folder);

  const std::vector<SafetensorsFile>& files() const { return files_; }
  // Tensors are numbered as their bytes lie, shard by shard.
  std::size_t size() const { return entries_.size(); }
  const SafetensorsFile& file(std::size_t i) const { return files_[entries_[i].file]; }
  const SafetensorsTensor& tensor(std::size_t i) const {
    return file(i).tensors()[entries_[i].tensor];
  }
  std::span<const std::byte> bytes(std::size_t i) const { return file(i).bytes(tensor(i)); }
  std::optional<std::size_t> find(std::string_view name) const;
  std::size_t unlisted() const { return unlisted_; }

 private:
  struct Entry {
    std::uint32_t file, tensor;
  };
  SafetensorsFolder() = default;
  void sort_names();

  std::vector<SafetensorsFile> files_;
  std::vector<Entry> entries_;
  std::vector<std::uint32_t> by_name_;
  std::size_t unlisted_ = 0;
};

// A folder's model.safetensors, or, where the tensors have more than `shard_bytes` bytes,
// model-00001-of-00005.safetensors and so on: tensors fill the shards in the order given, and a
// larger one has a shard of its own. `folder` opens the error messages.
Result<OutputLayout> lay_out_safetensors(const std::string& folder,
                                         std::span<const SafetensorsSpec> tensors,
                                         std::uint64_t shard_bytes,
                                         SafetensorsMetadata metadata = {});
// model.safetensors.index.json of such a folder; `metadata` is JSON, a member each: "\"a\": 1".
Result<std::string> safetensors_index(const std::string& folder,
                                      std::span<const SafetensorsSpec> tensors,
                                      const OutputLayout& layout,
                                      std::span<const std::string> metadata);

// Names, dtypes and shapes are given first, so that the header is written before the data; the
// bytes then come in any order, tensor by tensor or in turns. Bytes are laid out as the reference
// implementation does, by falling alignment and then by name, which keeps every tensor aligned.
class SafetensorsWriter {
 public:
  static Result<SafetensorsWriter> create(const std::string& path,
                                          std::vector<SafetensorsSpec> tensors,
                                          SafetensorsMetadata metadata = {}, bool force = false);
  // The files of lay_out_safetensors in a folder that exists, and the index where there are
  // several. `force` replaces the model there.
  static Result<SafetensorsWriter> create_folder(const std::string& folder,
                                                 std::vector<SafetensorsSpec> tensors,
                                                 std::uint64_t shard_bytes,
                                                 SafetensorsMetadata metadata = {},
                                                 bool force = false);

  // The next bytes of tensor `i` of those given. One thread at a time.
  Status append(std::size_t i, std::span<const std::byte> bytes);
  // Refuses tensors that lack bytes. The index is the last file to appear.
  Status commit();

 private:
  SafetensorsWriter() = default;
  static Result<SafetensorsWriter> make(const std::string& folder,
                                        std::vector<SafetensorsSpec> tensors, OutputLayout layout,
                                        bool force);
  Status commit_all();
  Status write_index();

  std::string folder_;  // with its slash; empty for a single file
  std::vector<PartialFile> files_;
  std::vector<SafetensorsSpec> tensors_;
  OutputLayout layout_;
  std::vector<std::uint64_t> written_;  // bytes of each tensor
  bool force_ = false;
};

}  // namespace bittern
