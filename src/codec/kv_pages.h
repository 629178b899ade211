// The pages that a KvCache and its forks share.
#pragma once
#include <algorithm>
#include <vector>

#include "bittern/kv_cache.h"
#include "codec/kv_checks.h"

namespace bittern {

struct KvCache::Pool {
  explicit Pool(const KvCacheConfig& c)
      : heads(c.kv_heads),
        page_size(c.page_size),
        scale_bytes(c.f16_scale ? 2 : 4),
        words{packed_words(c.dim, c.k.bits), packed_words(c.dim, c.v.bits)} {}

  std::int64_t heads, page_size, scale_bytes;
  std::int64_t words[2];  // of a row of K, of V
  std::vector<std::uint32_t> codes[2];
  std::vector<std::byte> scales[2];
  std::vector<std::int32_t> holders;  // of each page
  std::vector<std::int32_t> unused;

  std::int64_t pages() const { return static_cast<std::int64_t>(holders.size()); }
  std::int64_t rows() const { return heads * page_size; }  // of a page
  std::size_t page_bytes() const {
    return kv::at(rows() * (4 * (words[0] + words[1]) + 2 * scale_bytes));
  }
  std::uint32_t* row(int side, std::int64_t page, std::int64_t head, std::int64_t token) {
    return codes[side].data() + ((page * heads + head) * page_size + token) * words[side];
  }
  std::byte* scale(int side, std::int64_t page, std::int64_t head, std::int64_t token) {
    return scales[side].data() + ((page * heads + head) * page_size + token) * scale_bytes;
  }

  std::int32_t take() {
    if (unused.empty()) {
      const auto page = static_cast<std::int32_t>(pages());
      // All that may throw comes before anything is changed for good.
      unused.reserve(kv::at(pages() + 1));
      for (int side = 0; side < 2; ++side) {
        codes[side].resize(kv::at((page + 1) * rows() * words[side]));
        scales[side].resize(kv::at((page + 1) * rows() * scale_bytes));
      }
      holders.push_back(1);
      return page;
    }
    const std::int32_t page = unused.back();
    unused.pop_back();
    holders[kv::at(page)] = 1;
    return page;
  }
  void hold(std::int32_t page) { ++holders[kv::at(page)]; }
  void drop(std::int32_t page) {
    if (--holders[kv::at(page)] == 0) unused.push_back(page);
  }
  std::int32_t copy(std::int32_t page) {
    const std::int32_t other = take();
    for (int side = 0; side < 2; ++side) {
      std::copy_n(row(side, page, 0, 0), rows() * words[side], row(side, other, 0, 0));
      std::copy_n(scale(side, page, 0, 0), rows() * scale_bytes, scale(side, other, 0, 0));
    }
    return other;
  }
};

}  // namespace bittern
