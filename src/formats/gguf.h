// GGUF, the model file of ggml and llama.cpp: versions 2 and 3 in, 3 out (gguf_contents.h), little
// endian.
//
//   "GGUF" u32 version, u64 tensors, u64 keys
//   keys:    string key, u32 type, value             a string is u64 length, bytes
//   tensors: string name, u32 rank, u64 dim[rank] (innermost first), u32 type, u64 offset
//   padding to general.alignment (32), then the tensors' bytes, each at its offset from here
//
// Values are read from the mapped file. The memory that opening allocates is bounded by the two
// limits below, not by what the file claims.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bittern/status.h"
#include "bittern/tensor.h"
#include "formats/ggml_type.h"
#include "formats/mapped_file.h"

namespace bittern {

inline constexpr std::uint64_t kGgufMostKeys = 1 << 16;
inline constexpr std::uint64_t kGgufMostTensors = 1 << 18;      // over all parts of a split file
inline constexpr std::uint64_t kGgufMostKeyBytes = 65535;       // the format's own limit
inline constexpr std::uint64_t kGgufMostNameBytes = 64;         // the format's own limit
inline constexpr std::uint64_t kGgufMostWrittenNameBytes = 63;  // llama.cpp adds a NUL within 64
inline constexpr std::uint64_t kGgufMostElements = 1 << 22;  // that integers(), numbers() convert
inline constexpr int kGgufMostDepth = 4;                     // of arrays in arrays
inline constexpr std::uint32_t kGgufAlignment = 32;

// ---- metadata ----

enum class GgufType : std::uint32_t {
  u8 = 0,
  s8 = 1,
  u16 = 2,
  s16 = 3,
  u32 = 4,
  s32 = 5,
  f32 = 6,
  boolean = 7,
  string = 8,
  array = 9,
  u64 = 10,
  s64 = 11,
  f64 = 12,
};
inline constexpr std::uint32_t kGgufTypeCount = 13;

const char* name(GgufType type);            // "u8", "bool", "string", ...
std::uint64_t size_of_gguf(GgufType type);  // of one value; 0 for string and array

// One value, a view into its file. It is valid, because the file was checked when it was opened.
class GgufValue {
 public:
  GgufType type() const { return type_; }
  // Nothing when the value is of another kind or out of the result's range.
  std::optional<std::uint64_t> as_uint() const;    // of any integer type
  std::optional<std::int64_t> as_integer() const;  // of any integer type
  std::optional<double> as_number() const;         // of any integer or float type
  std::optional<bool> as_bool() const;
  std::optional<std::string_view> as_string() const;

  // Of an array; an empty one keeps its element type.
  GgufType element() const { return element_; }
  std::uint64_t size() const { return count_; }
  // Element i of an array whose elements have one size; i < size(), no strings, no arrays.
  GgufValue at(std::uint64_t i) const;
  // f(GgufValue) for the elements of any array in order.
  template <class F>
  void each(F&& f) const {
    std::size_t from = 0;
    for (std::uint64_t i = 0; i < count_; ++i) f(next(from));
  }

  // The bytes in the file, without the type (for an array, with element type and count).
  std::span<const std::byte> encoded() const { return encoded_; }

 private:
  friend class GgufReader;
  static GgufValue make(GgufType type, std::span<const std::byte> encoded);
  GgufValue next(std::size_t& from) const;  // the element at `from`, which moves on

  GgufType type_ = GgufType::u8, element_ = GgufType::u8;
  std::uint64_t count_ = 0;
  std::span<const std::byte> encoded_;
};

struct GgufKey {
  std::string_view key;
  GgufValue value;
};

struct GgufTensor {
  std::string_view name;
  GgmlType type = GgmlType::f32;
  Shape shape;  // row major: the last dimension is the innermost, the file's first
  std::span<const std::byte> bytes;  // aligned as the file says, which may be to 1
  std::uint32_t part = 0;            // of a split file
};

class GgufFile {
 public:
  // A part of a split file ("-00002-of-00003.gguf") opens all parts beside it, unless `alone`.
  // The metadata are then those of the first part, the tensors those of all parts in order.
  static Result<GgufFile> open(const std::string& path, bool alone = false);

  const std::string& path() const { return path_; }  // as given to open
  std::uint32_t version() const { return version_; }
  std::uint32_t alignment() const { return alignment_; }
  std::span<const MappedFile> parts() const { return parts_; }

  std::span<const GgufKey> keys() const { return keys_; }  // in the file's order
  const GgufValue* find(std::string_view key) const;       // null: not there
  std::span<const GgufTensor> tensors() const { return tensors_; }
  const GgufTensor* tensor(std::string_view name) const;  // null: not there

  // A key that is missing, of another kind or out of range is an error that names file and key.
  Result<std::uint64_t> uint(std::string_view key) const;
  Result<std::int64_t> integer(std::string_view key) const;
  Result<double> number(std::string_view key) const;
  Result<bool> boolean(std::string_view key) const;
  Result<std::string_view> string(std::string_view key) const;
  Result<GgufValue> array(std::string_view key) const;
  Result<std::vector<std::string_view>> strings(std::string_view key) const;
  Result<std::vector<std::int64_t>> integers(std::string_view key) const;
  Result<std::vector<double>> numbers(std::string_view key) const;

 private:
  friend class GgufReader;
  Status read(MappedFile file);
  Status join_parts();
  Status index_tensors();
  Result<GgufValue> array_of(std::string_view key, const char* expected,
                             bool (*fits)(GgufType)) const;

  std::string path_;
  std::uint32_t version_ = 0, alignment_ = 0;
  std::vector<MappedFile> parts_;
  std::vector<std::vector<std::byte>> heads_;  // copies; names, keys and values are views of them
  std::vector<GgufKey> keys_;
  std::vector<std::uint32_t> keys_by_name_;
  std::vector<GgufTensor> tensors_;
  std::vector<std::uint32_t> tensors_by_name_;
};

}  // namespace bittern
