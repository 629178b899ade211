// Whether two runs would do the same: FNV-1a over everything that decides the result. It guards
// against mistakes, not against malice.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace bittern {

class Fingerprint {
 public:
  void add(std::span<const std::byte> bytes) {
    mix(bytes.size());
    for (const std::byte b : bytes) mix_byte(static_cast<std::uint8_t>(b));
  }
  void add(std::string_view text) { add(std::as_bytes(std::span(text))); }
  void add(std::uint64_t x) { mix(x); }
  std::uint64_t value() const { return hash_; }

 private:
  void mix(std::uint64_t x) {
    for (int i = 0; i < 8; ++i) mix_byte(static_cast<std::uint8_t>(x >> (8 * i)));
  }
  void mix_byte(std::uint8_t b) { hash_ = (hash_ ^ b) * 0x100000001b3; }

  std::uint64_t hash_ = 0xcbf29ce484222325;
};

}  // namespace bittern
