// Numbers and lists as bytes, for other processes and for files that the same build reads again.
#pragma once
#include <cstddef>
#include <cstring>
#include <span>
#include <type_traits>
#include <vector>

namespace bittern {

class Packer {
 public:
  template <class T>
  void add(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    append(std::as_bytes(std::span(&value, 1)));
  }
  template <class T>
  void add(const std::vector<T>& values) {
    add(values.size());
    append(std::as_bytes(std::span(values)));
  }
  std::span<const std::byte> bytes() const { return bytes_; }
  void clear() { bytes_.clear(); }

 private:
  void append(std::span<const std::byte> more) {
    bytes_.insert(bytes_.end(), more.begin(), more.end());
  }
  std::vector<std::byte> bytes_;
};

// What a Packer packed, in the same order. Where bytes are missing, nothing more is taken, and ok()
// is false.
class Unpacker {
 public:
  explicit Unpacker(std::span<const std::byte> bytes) : rest_(bytes) {}
  bool ok() const { return ok_; }
  bool empty() const { return rest_.empty(); }
  template <class T>
  void take(T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    move(&value, 1, sizeof value);
  }
  template <class T>
  void take(std::vector<T>& values) {
    std::size_t count = 0;
    take(count);
    if (!has(count, sizeof(T))) return;
    values.resize(count);
    move(values.data(), count, sizeof(T));
  }
  template <class T>
  T next() {
    T value{};
    take(value);
    return value;
  }

 private:
  bool has(std::size_t count, std::size_t size) {
    ok_ = ok_ && count <= rest_.size() / size;
    if (!ok_) rest_ = {};
    return ok_;
  }
  void move(void* to, std::size_t count, std::size_t size) {
    if (!has(count, size)) return;
    if (count > 0) std::memcpy(to, rest_.data(), count * size);
    rest_ = rest_.subspan(count * size);
  }
  std::span<const std::byte> rest_;
  bool ok_ = true;
};

}  // namespace bittern
