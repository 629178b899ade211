// Memory from the system.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "bittern/status.h"

namespace bittern {

// Zeroed, in large pages where it fills one and the system has them. Pages that nobody touches cost
// nothing.
class LargePages {
 public:
  LargePages() = default;
  static Result<LargePages> make(std::size_t bytes);
  LargePages(LargePages&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  LargePages& operator=(LargePages&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~LargePages();

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// Memory that a forward pass takes piece by piece and gives back in the opposite order. It is kept
// for the next pass: memory that comes from the system anew has to be zeroed by it first.
class Scratch {
 public:
  struct Mark {
    std::size_t block = 0, used = 0;
  };
  Mark mark() const { return at_; }
  void release(Mark mark) { at_ = mark; }

  // Not set to anything; begins a cache line. Throws std::bad_alloc.
  std::byte* take(std::size_t bytes);
  float* floats(std::int64_t count) {
    return reinterpret_cast<float*>(take(static_cast<std::size_t>(count) * sizeof(float)));
  }

 private:
  std::vector<LargePages> blocks_;
  Mark at_;
};

// Bytes that this process may still take without making others swap, or the limit of its container
// if that is less; nothing where the system does not tell.
std::optional<std::uint64_t> available_memory();

}  // namespace bittern
