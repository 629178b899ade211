// Which pages a KvCache holds, and which it gives back.
#include "codec/kv_pages.h"

namespace bittern {

using kv::at;

void KvCache::release() {
  if (pool_ == nullptr) return;  // moved from
  for (const std::int32_t page : table_) pool_->drop(page);
  table_.clear();
}

KvCache::Slot KvCache::slot(std::int64_t token) const {
  const std::int64_t i = token - table_begin_;
  return {table_[at(i / config_.page_size)], i % config_.page_size};
}

// Room for `tokens` more coded ones.
Status KvCache::reserve_pages(std::int64_t tokens) {
  if (tokens == 0) return {};
  if (table_.empty()) table_begin_ = coded_end_;
  const std::int64_t needed = coded_end_ + tokens - table_begin_;
  while (static_cast<std::int64_t>(table_.size()) * config_.page_size < needed)
    table_.push_back(pool_->take());
  return {};
}

void KvCache::make_own(std::size_t index) {
  const std::int32_t page = table_[index];
  if (pool_->holders[at(page)] == 1) return;
  table_[index] = pool_->copy(page);
  pool_->drop(page);
}

// Pages without a token of ours go back to the pool.
void KvCache::drop_pages() {
  const std::int64_t size = config_.page_size;
  while (!table_.empty() && (coded_begin_ == coded_end_ || table_begin_ + size <= coded_begin_)) {
    pool_->drop(table_.front());
    table_.pop_front();
    table_begin_ += size;
  }
  while (!table_.empty() &&
         table_begin_ + (static_cast<std::int64_t>(table_.size()) - 1) * size >= coded_end_) {
    pool_->drop(table_.back());
    table_.pop_back();
  }
}

void KvCache::forget() {
  if (config_.window > 0) {
    const std::int64_t oldest = size_ - config_.window - config_.slack;
    coded_begin_ = std::clamp(oldest, coded_begin_, coded_end_);
  }
  drop_pages();
}

}  // namespace bittern
