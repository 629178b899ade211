// A hash to tell whether two things are the same: FNV-1a over 64-bit words. It protects against
// mistakes, not against malice.
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
    value_ ^= value_ >> 32;  // a product's low bits do not depend on the word's high bits
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

// The same for many bytes: eight independent chains, so that only memory limits the speed. Each
// step is a bijection of the chain and of the word, so one flipped bit always changes the result.
class Checksum {
 public:
  // All parts but the last are multiples of kBlock.
  static constexpr std::size_t kBlock = 64;
  void add(std::span<const std::byte> bytes) {
    size_ += bytes.size();
    while (bytes.size() >= kBlock) {
      std::uint64_t words[kChains];
      std::memcpy(words, bytes.data(), kBlock);
      for (std::size_t i = 0; i < kChains; ++i) {
        chains_[i] = (chains_[i] ^ words[i]) * 0x9e3779b97f4a7c15;
        chains_[i] ^= chains_[i] >> 32;
      }
      bytes = bytes.subspan(kBlock);
    }
    if (!bytes.empty()) rest_.add(bytes);
  }
  std::uint64_t value() const {
    Fingerprint all = rest_;
    if (size_ % kBlock == 0) all.add(std::span<const std::byte>());  // the rest is empty
    for (const std::uint64_t chain : chains_) all.add(chain);
    all.add(size_);
    return all.value();
  }
  static std::uint64_t of(std::span<const std::byte> bytes) {
    Checksum sum;
    sum.add(bytes);
    return sum.value();
  }

 private:
  static constexpr std::size_t kChains = kBlock / sizeof(std::uint64_t);
  std::uint64_t chains_[kChains] = {1, 2, 3, 4, 5, 6, 7, 8};
  std::uint64_t size_ = 0;
  Fingerprint rest_;
};

}  // namespace bittern
