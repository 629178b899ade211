// A GGUF file to be written: its keys and tensors, and where each goes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "bittern/status.h"
#include "bittern/tensor.h"
#include "formats/gguf.h"
#include "formats/mapped_file.h"

namespace bittern {

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
  std::string bytes_;
  friend class GgufContents;
};

// The keys and tensors of a file to be written, from which follows where each goes.
class GgufContents {
 public:
  // `path` is the file's, which errors name. general.alignment, when not 32, is a key.
  explicit GgufContents(std::string path) : path_(std::move(path)) {}

  Status add(std::string_view key, const GgufData& value);
  Status add_tensor(std::string_view name, GgmlType type, const Shape& shape);
  std::uint64_t file_bytes() const;  // of what was added so far
  OutputLayout lay_out() const;      // the same

 private:
  struct Tensor {
    std::string name;
    GgmlType type;
    Shape shape;
    std::uint64_t bytes;
  };
  std::uint64_t header_bytes() const;
  Status refuse(const std::string& what) const;

  std::string path_;
  std::uint32_t alignment_ = kGgufAlignment;
  std::string encoded_keys_;
  std::set<std::string, std::less<>> keys_, names_;
  std::vector<Tensor> tensors_;
  std::uint64_t info_bytes_ = 0, data_bytes_ = 0;
};

}  // namespace bittern
