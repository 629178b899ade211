// The memory of a KvCache: which pages it holds and gives back, and how its bf16 regions grow.
#include "codec/kv_pages.h"

namespace bittern {

using kv::at;

// ---- the pool ----

Status KvCache::Pool::fill_tables(const KvCacheConfig& config) {
  if (on_host(device)) return {};
  std::vector<float> all;
  visit_kv_tables(config, [&](const char*, const std::vector<float>& values, const char*) {
    all.insert(all.end(), values.begin(), values.end());
  });
  BITTERN_TRY(copies.grow(all.size() * sizeof(float), {}));
  BITTERN_TRY(transfer(device, copies.data(), {}, all.data(), all.size() * sizeof(float)));
  return wait_for(device);
}

kv::Tables KvCache::Pool::tables(const KvCacheConfig& config, int side) const {
  const KvSide& wanted = side == 0 ? config.k : config.v;
  const auto* copied = reinterpret_cast<const float*>(copies.data());
  kv::Tables found;
  visit_kv_tables(config, [&](const char*, const std::vector<float>& values, const char*) {
    const float* here = on_host(device) ? values.data() : copied;
    if (copied != nullptr) copied += values.size();
    if (values.empty()) return;
    if (&values == &wanted.table) found.table = here;
    if (&values == &wanted.codebook.levels) found.levels = here;
    if (&values == &wanted.codebook.boundaries) found.boundaries = here;
    if (&values == &wanted.mean) found.mean = here;
  });
  return found;
}

Status KvCache::Pool::reserve(std::size_t count, Stream stream) {
  const std::size_t more = count - std::min(count, unused.size());
  const std::size_t needed = holders.size() + more;
  // Slots are 32-bit.
  if (needed > at(INT32_MAX / page_size))
    return kv::refuse("pages", std::to_string(needed) +
                                   " in a cache and its forks, expected at most " +
                                   std::to_string(INT32_MAX / page_size));
  const auto room = [](auto& vector, std::size_t size) {
    if (size > vector.capacity()) vector.reserve(std::max(size, 2 * vector.capacity()));
  };
  room(holders, needed);
  room(unused, needed);
  const std::size_t held = scales[0].size() / scales_bytes();
  if (needed <= held) return {};
  const std::size_t pages = std::max(needed, 2 * held);
  for (int side = 0; side < 2; ++side) {
    BITTERN_TRY(codes[side].grow(pages * code_bytes(side), stream));
    BITTERN_TRY(scales[1 - side].grow(pages * scales_bytes(), stream));
  }
  return {};
}

// ---- a cache's pages ----

void KvCache::release() {
  if (pool_ == nullptr) return;  // moved from
  for (const std::int32_t page : table_) pool_->drop(page);
  table_.clear();
}

KvCache::Slot KvCache::slot(std::int64_t token) const {
  const std::int64_t i = token - table_begin_;
  return {table_[at(i / config_.page_size)], i % config_.page_size};
}

// Room for `tokens` more coded ones, in pages that no other cache holds.
Status KvCache::reserve_pages(std::int64_t tokens) {
  if (tokens == 0) return {};
  if (table_.empty()) table_begin_ = coded_end_;
  const std::int64_t size = config_.page_size, begun = coded_end_ - table_begin_;
  const std::size_t pages = at((begun + tokens + size - 1) / size);
  if (pages > table_.capacity()) table_.reserve(std::max(pages, 2 * table_.capacity()));
  // The page that the first of them goes to may have tokens already.
  const std::size_t last = at(begun / size);
  const bool shared = last < table_.size() && pool_->holders[at(table_[last])] > 1;
  BITTERN_TRY(pool_->reserve(pages - std::min(pages, table_.size()) + (shared ? 1 : 0), stream_));
  if (shared) {
    const std::int32_t page = pool_->take();
    if (Status s = pool_->copy_page(table_[last], page, stream_); !s.ok()) {
      pool_->drop(page);
      return s;
    }
    pool_->drop(table_[last]);
    table_[last] = page;
  }
  while (table_.size() < pages) table_.push_back(pool_->take());
  return {};
}

// Room for so many first and recent tokens. What is held stays, also where memory is short.
Status KvCache::reserve_exact(std::int64_t first, std::int64_t recent) {
  const std::int64_t heads = config_.kv_heads, dim = config_.dim;
  const auto bytes = [&](std::int64_t slots) { return at(heads * slots * dim) * sizeof(bf16); };
  // Tokens begin..end keep their rows.
  const auto grow = [&](std::int64_t needed, std::int64_t most, std::int64_t begin,
                        std::int64_t end, Regions::Region& region) -> Status {
    const std::int64_t slots = region.slots;
    if (needed <= slots) return {};
    Regions::Region larger(device_);
    larger.slots = std::min(most, std::max(needed, 2 * slots));
    for (int s = 0; s < 2; ++s) {
      BITTERN_TRY(larger.rows[s].grow(bytes(larger.slots), stream_));
      for (std::int64_t h = 0; h < heads; ++h) {
        for (std::int64_t t = begin, run; t < end; t += run) {
          run = std::min({end - t, slots - t % slots, larger.slots - t % larger.slots});
          BITTERN_TRY(copy_on(device_, larger.row(s, h, t, dim), region.row(s, h, t, dim),
                              at(run * dim) * sizeof(bf16), stream_));
        }
      }
    }
    region = std::move(larger);
    return {};
  };
  BITTERN_TRY(grow(first, config_.first, 0, this->first(), regions_->first));
  return grow(recent, config_.recent, coded_end_, size_, regions_->recent);
}

// Pages without a token of ours go back to the pool.
void KvCache::drop_pages() {
  const std::int64_t size = config_.page_size;
  std::size_t gone = 0;
  while (gone < table_.size() &&
         (coded_begin_ == coded_end_ || table_begin_ + size <= coded_begin_)) {
    pool_->drop(table_[gone++]);
    table_begin_ += size;
  }
  table_.erase(table_.begin(), table_.begin() + static_cast<std::ptrdiff_t>(gone));
  while (!table_.empty() &&
         table_begin_ + (static_cast<std::int64_t>(table_.size()) - 1) * size >= coded_end_) {
    pool_->drop(table_.back());
    table_.pop_back();
  }
}

// The oldest coded token that a cache of `size` tokens keeps.
std::int64_t KvCache::oldest(std::int64_t size) const {
  return config_.window > 0 ? size - config_.window - config_.slack : 0;
}

void KvCache::forget() {
  coded_begin_ = std::clamp(oldest(size_), coded_begin_, coded_end_);
  drop_pages();
}

// ---- copies ----

// Everything of a cache of the same config, to this one, which is empty.
Status KvCache::copy_from(const KvCache& other) {
  const auto whole = [&](Memory& to, const Memory& from) -> Status {
    BITTERN_TRY(to.grow(from.size(), {}));
    return transfer(device_, to.data(), other.device_, from.data(), from.size());
  };
  BITTERN_TRY(wait_for(other.device_));
  for (const auto& [to, from] : {std::pair{&regions_->first, &other.regions_->first},
                                 {&regions_->recent, &other.regions_->recent}}) {
    for (int s = 0; s < 2; ++s) BITTERN_TRY(whole(to->rows[s], from->rows[s]));
    to->slots = from->slots;
  }
  table_.reserve(other.table_.size());
  BITTERN_TRY(pool_->reserve(other.table_.size(), {}));
  for (std::size_t i = 0, run = 1; i < other.table_.size(); i += run) {
    // Pages that follow each other go together.
    for (run = 1;
         i + run < other.table_.size() && other.table_[i + run - 1] + 1 == other.table_[i + run];)
      ++run;
    for (std::size_t j = 0; j < run; ++j) table_.push_back(pool_->take());
    const std::int32_t to = table_[i], from = other.table_[i];
    for (int s = 0; s < 2; ++s) {
      BITTERN_TRY(transfer(device_, pool_->row(s, to, 0, 0), other.device_,
                           other.pool_->row(s, from, 0, 0), run * pool_->code_bytes(s)));
      BITTERN_TRY(transfer(device_, pool_->scale(s, to, 0, 0), other.device_,
                           other.pool_->scale(s, from, 0, 0), run * pool_->scales_bytes()));
    }
  }
  table_begin_ = other.table_begin_;
  size_ = other.size_;
  coded_begin_ = other.coded_begin_;
  coded_end_ = other.coded_end_;
  return wait_for(device_);
}

}  // namespace bittern
