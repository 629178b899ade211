// GGUF, the model file of ggml and llama.cpp: versions 2 and 3 in, 3 out, little endian.
//
//   "GGUF" u32 version, u64 tensors, u64 keys
//   keys:    string key, u32 type, value             a string is u64 length, bytes
//   tensors: string name, u32 rank, u64 dim[rank] (innermost first), u32 type, u64 offset
//   padding to general.alignment (32), then the tensors' bytes, each at its offset from here
//
// Values stay in the mapped file: what opening allocates is bounded by the two limits below, not by
// what the file claims.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "bittern/status.h"
#include "bittern/tensor.h"
#include "formats/mapped_file.h"

namespace bittern {

inline constexpr std::uint64_t kGgufMostKeys = 1 << 16;
inline constexpr std::uint64_t kGgufMostTensors = 1 << 18;      // over all parts of a split file
inline constexpr std::uint64_t kGgufMostKeyBytes = 65535;       // the format's own limit
inline constexpr std::uint64_t kGgufMostNameBytes = 64;         // the format's own limit
inline constexpr std::uint64_t kGgufMostWrittenNameBytes = 63;  // llama.cpp adds a NUL within 64
inline constexpr std::uint64_t kGgufMostElements = 1 << 22;  // that integers(), numbers() convert
inline constexpr int kGgufMostDepth = 4;                     // of arrays in arrays
inline constexpr int kGgufMostRank = 4;
inline constexpr std::uint32_t kGgufAlignment = 32;

// ---- tensor types ----

enum class GgmlType : std::uint32_t {
  f32 = 0,
  f16 = 1,
  q4_0 = 2,
  q4_1 = 3,
  q5_0 = 6,
  q5_1 = 7,
  q8_0 = 8,
  q8_1 = 9,
  q2_k = 10,
  q3_k = 11,
  q4_k = 12,
  q5_k = 13,
  q6_k = 14,
  q8_k = 15,
  iq2_xxs = 16,
  iq2_xs = 17,
  iq3_xxs = 18,
  iq1_s = 19,
  iq4_nl = 20,
  iq3_s = 21,
  iq2_s = 22,
  iq4_xs = 23,
  i8 = 24,
  i16 = 25,
  i32 = 26,
  i64 = 27,
  f64 = 28,
  iq1_m = 29,
  bf16 = 30,
  tq1_0 = 34,
  tq2_0 = 35,
  mxfp4 = 39,
  nvfp4 = 40,
  q1_0 = 41,
};

struct GgmlTypeInfo {
  GgmlType type;
  const char* name;     // "Q4_K"
  std::uint32_t block;  // elements of a block, all of one row
  std::uint32_t block_bytes;
  bool readable;  // whether bittern turns it into numbers
};

std::span<const GgmlTypeInfo> ggml_types();
const GgmlTypeInfo* ggml_type(std::uint32_t id);           // null: ggml has no such type (any more)
const GgmlTypeInfo* ggml_type(std::string_view any_case);  // by name
inline const GgmlTypeInfo& info(GgmlType type) {
  return *ggml_type(static_cast<std::uint32_t>(type));
}

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

// One value, a view into the file it came from; well formed, as the file was checked when opened.
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

  // As encoded in the file, without the type (and with element type and count of an array).
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

// The bytes of a tensor of this type and row-major shape, or why it cannot be.
Result<std::uint64_t> ggml_bytes(GgmlType type, const Shape& shape);

class GgufFile {
 public:
  // A part of a split file ("-00002-of-00003.gguf") opens all parts beside it, unless `alone`.
  // Metadata are those of the first part then, tensors those of all in order.
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

  // ok when bittern turns the tensor's type into numbers.
  Status readable(const GgufTensor& tensor) const;

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

// ---- writing ----

// A value to write.
class GgufData {
 public:
  // Of the scalar's own type: GgufData(std::uint32_t{7}) is a u32, GgufData(true) a bool.
  template <class T>
    requires std::is_arithmetic_v<T>
  explicit GgufData(T x) : type_(type_of<T>()) {
    put(x);
  }
  explicit GgufData(std::string_view text) : type_(GgufType::string) { put_string(text); }
  explicit GgufData(const char* text) : GgufData(std::string_view(text)) {}
  explicit GgufData(const GgufValue& value);  // a copy, bit for bit

  template <class T>
    requires std::is_arithmetic_v<T>
  static GgufData array(std::span<const T> values) {
    GgufData data = empty_array(type_of<T>(), values.size());
    for (const T x : values) data.put(x);
    return data;
  }
  static GgufData strings(std::span<const std::string_view> values);
  static GgufData arrays(std::span<const GgufData> values);  // each an array

  GgufType type() const { return type_; }
  std::span<const std::byte> encoded() const { return std::as_bytes(std::span(bytes_)); }

  template <class T>
  static constexpr GgufType type_of() {
    if constexpr (std::is_same_v<T, bool>) {
      return GgufType::boolean;
    } else if constexpr (std::is_floating_point_v<T>) {
      static_assert(sizeof(T) <= 8);
      return sizeof(T) == 4 ? GgufType::f32 : GgufType::f64;
    } else {
      constexpr bool s = std::is_signed_v<T>;
      return sizeof(T) == 1   ? (s ? GgufType::s8 : GgufType::u8)
             : sizeof(T) == 2 ? (s ? GgufType::s16 : GgufType::u16)
             : sizeof(T) == 4 ? (s ? GgufType::s32 : GgufType::u32)
                              : (s ? GgufType::s64 : GgufType::u64);
    }
  }

 private:
  GgufData() = default;
  static GgufData empty_array(GgufType element, std::uint64_t count);
  template <class T>
  void put(T x) {
    bytes_.append(reinterpret_cast<const char*>(&x), sizeof x);
  }
  void put_string(std::string_view text);

  GgufType type_ = GgufType::u8;
  int depth_ = 0;  // of arrays in arrays
  bool well_formed_ = true;
  std::string bytes_;
  friend class GgufWriter;
};

// Everything about keys and tensors first, then begin, then every tensor's bytes in order and in
// pieces of any size, then commit: only then is there a file at `path`.
class GgufWriter {
 public:
  // `path` is where begin will write; errors name it. general.alignment, when not 32, is a key.
  explicit GgufWriter(std::string path) : path_(std::move(path)) {}

  Status add(std::string_view key, const GgufData& value);
  Status add_tensor(std::string_view name, GgmlType type, const Shape& shape);
  std::uint64_t file_bytes() const;  // of what was added so far
  OutputLayout lay_out() const;      // of the same, for who writes the bytes himself

  Status begin(bool force = false);  // force: may replace a file
  Status write(std::string_view tensor, std::span<const std::byte> bytes);
  Status commit();

 private:
  struct Tensor {
    std::string name;
    GgmlType type;
    Shape shape;
    std::uint64_t bytes;
  };
  std::uint64_t header_bytes() const;
  Status put(std::span<const std::byte> bytes);
  Status pad(std::uint64_t written);
  Status finish_tensors();  // pads what is complete and moves on
  Status refuse(const std::string& what) const;

  std::string path_;
  std::uint32_t alignment_ = kGgufAlignment;
  std::string encoded_keys_;
  std::set<std::string, std::less<>> keys_, names_;
  std::vector<Tensor> tensors_;
  std::uint64_t info_bytes_ = 0, data_bytes_ = 0;
  std::optional<PartialFile> file_;
  bool began_ = false;
  std::size_t current_ = 0;    // the tensor being written
  std::uint64_t written_ = 0;  // of it
};

}  // namespace bittern
