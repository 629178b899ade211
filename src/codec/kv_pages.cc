// The memory of a KvCache: which pages it holds and gives back, and how its bf16 regions grow.
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
  const std::size_t pages = at((needed + config_.page_size - 1) / config_.page_size);
  if (pages > table_.capacity()) table_.reserve(std::max(pages, 2 * table_.capacity()));
  while (table_.size() < pages) table_.push_back(pool_->take());
  return {};
}

// Room for so many first and recent tokens. What is held stays, also where memory is short.
void KvCache::reserve_exact(std::int64_t first, std::int64_t recent) {
  const std::int64_t heads = config_.kv_heads, dim = config_.dim;
  // Tokens begin..end keep their rows.
  const auto grow = [&](std::int64_t needed, std::int64_t most, std::int64_t begin,
                        std::int64_t end, std::int64_t& slots, std::vector<bf16>& k,
                        std::vector<bf16>& v) {
    if (needed <= slots) return;
    const std::int64_t more = std::min(most, std::max(needed, 2 * slots));
    std::vector<bf16> larger[] = {std::vector<bf16>(at(heads * more * dim)),
                                  std::vector<bf16>(at(heads * more * dim))};
    for (int s = 0; s < 2; ++s) {
      std::vector<bf16>& rows = s == 0 ? k : v;
      for (std::int64_t h = 0; h < heads; ++h)
        for (std::int64_t t = begin; t < end; ++t)
          std::copy_n(rows.data() + (h * slots + t % slots) * dim, dim,
                      larger[s].data() + (h * more + t % more) * dim);
      rows = std::move(larger[s]);
    }
    slots = more;
  };
  grow(first, config_.first, 0, this->first(), first_slots_, k_first_, v_first_);
  grow(recent, config_.recent, coded_end_, size_, recent_slots_, k_recent_, v_recent_);
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

}  // namespace bittern
