// Whether two things are the same, for what that is worth: FNV-1a over 64-bit words. It guards
// against mistakes, not against malice.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

namespace bittern {

class Fingerprint {
 public:
  std::uint64_t value() const { return value_; }
  void add(std::uint64_t word) {
    value_ = (value_ ^ word) * 0x100000001b3;
    value_ ^= value_ >> 32;  // a product's low bits know nothing of the word's high ones
  }
  // The last word is filled up with zeros.
  void add(std::span<const std::byte> bytes) {
    add(bytes.size());
    while (!bytes.empty()) {
      std::uint64_t word = 0;
      const std::size_t n = std::min(bytes.size(), sizeof word);
      std::memcpy(&word, bytes.data(), n);
      add(word);
      bytes = bytes.subspan(n);
    }
  }
  void add(std::string_view text) { add(std::as_bytes(std::span(text))); }

 private:
  std::uint64_t value_ = 0xcbf29ce484222325;
};

}  // namespace bittern
