// Where a KvCache keeps its rows: pages, which forks share, and the bf16 regions.
#pragma once
#include <algorithm>
#include <vector>

#include "bittern/kv_cache.h"
#include "codec/kv_checks.h"
#include "plan/memory.h"

namespace bittern {

namespace kv {

// A side's tables, where the cache is; null: none.
struct Tables {
  const float *table = nullptr, *levels = nullptr, *boundaries = nullptr, *mean = nullptr;
};

}  // namespace kv

struct KvCache::Pool {
  Pool(const KvCacheConfig& c, Device where)
      : device(where),
        heads(c.kv_heads),
        page_size(c.page_size),
        scale_bytes(c.f16_scale ? 2 : 4),
        words{packed_words(c.dim, c.k.bits), packed_words(c.dim, c.v.bits)},
        codes{Memory(where), Memory(where)},
        scales{Memory(where), Memory(where)},
        copies(where) {}

  Device device;
  std::int64_t heads, page_size, scale_bytes;
  std::int64_t words[2];  // of a row of K, of V
  Memory codes[2], scales[2];
  std::vector<std::int32_t> holders;  // of each page
  std::vector<std::int32_t> unused;
  Memory copies;  // of the config's tables, on a device

  std::int64_t pages() const { return static_cast<std::int64_t>(holders.size()); }
  std::int64_t rows() const { return heads * page_size; }                              // of a page
  std::size_t code_bytes(int side) const { return kv::at(rows() * 4 * words[side]); }  // of a page
  std::size_t scales_bytes() const { return kv::at(rows() * scale_bytes); }
  std::size_t page_bytes() const { return code_bytes(0) + code_bytes(1) + 2 * scales_bytes(); }
  std::byte* row(int side, std::int64_t page, std::int64_t head, std::int64_t token) const {
    return codes[side].data() + ((page * heads + head) * page_size + token) * 4 * words[side];
  }
  std::byte* scale(int side, std::int64_t page, std::int64_t head, std::int64_t token) const {
    return scales[side].data() + ((page * heads + head) * page_size + token) * scale_bytes;
  }

  // Copies the tables to the device; on the host those of the config are used.
  Status fill_tables(const KvCacheConfig& config);
  kv::Tables tables(const KvCacheConfig& config, int side) const;

  // Memory for so many pages that take() can give.
  Status reserve(std::size_t count, Stream stream);
  std::int32_t take() {
    if (unused.empty()) {
      holders.push_back(1);
      return static_cast<std::int32_t>(pages() - 1);
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
  // The first pages of `from` become those of `to`, one by one.
  Status copy_page(std::int32_t from, std::int32_t to, Stream stream) {
    for (int side = 0; side < 2; ++side) {
      BITTERN_TRY(
          copy_on(device, row(side, to, 0, 0), row(side, from, 0, 0), code_bytes(side), stream));
      BITTERN_TRY(
          copy_on(device, scale(side, to, 0, 0), scale(side, from, 0, 0), scales_bytes(), stream));
    }
    return {};
  }
};

// Rows in bf16, [kv_heads, slots, dim]. Slots grow with the tokens, to `first` and `recent` at
// most. Recent token t is in slot t % slots.
struct KvCache::Regions {
  struct Region {
    explicit Region(Device device) : rows{Memory(device), Memory(device)} {}
    std::int64_t slots = 0;
    Memory rows[2];  // of K, of V
    bf16* row(int side, std::int64_t head, std::int64_t token, std::int64_t dim) const {
      return reinterpret_cast<bf16*>(rows[side].data()) + (head * slots + token % slots) * dim;
    }
  };
  explicit Regions(Device device)
      : first(device), recent(device), slots(device), attended(device), scratch(device) {}

  Region first, recent;
  // On a device: the slots of the last append, what attention is told of the cache, and what it was
  // told last.
  Memory slots, attended, scratch;
  std::vector<std::int32_t> told;
};

}  // namespace bittern
