#include "text/bpe.h"

#include <algorithm>
#include <bit>
#include <queue>

#include "text/utf8.h"

namespace bittern::text {

// ---- merges ----

MergeTable::MergeTable(std::size_t merges) : entries_(std::bit_ceil(2 * merges + 2)) {}

std::size_t MergeTable::slot(std::uint64_t pair) const {
  const std::size_t mask = entries_.size() - 1;
  std::uint64_t hash = pair * 0x9E3779B97F4A7C15u;
  hash ^= hash >> 32;
  std::size_t i = hash & mask;
  while (entries_[i].pair != kEmpty && entries_[i].pair != pair) i = (i + 1) & mask;
  return i;
}

void MergeTable::put(std::uint32_t left, std::uint32_t right, std::uint32_t joined,
                     bool last_counts) {
  const std::uint64_t pair = std::uint64_t{left} << 32 | right;
  Entry& entry = entries_[slot(pair)];
  const std::uint32_t rank = count_++;
  if (entry.pair == pair && !last_counts) return;
  entry = {pair, {rank, joined}};
}

MergeTable::Merge MergeTable::find(std::uint32_t left, std::uint32_t right) const {
  return entries_[slot(std::uint64_t{left} << 32 | right)].merge;
}

// ---- by rank ----

namespace {

// For words: the best of few neighbours is found by looking at all.
void merge_short(const MergeTable& merges, std::vector<std::uint32_t>& ids) {
  constexpr std::size_t kMost = 64;
  MergeTable::Merge pairs[kMost];
  std::size_t n = ids.size();
  for (std::size_t i = 0; i + 1 < n; ++i) pairs[i] = merges.find(ids[i], ids[i + 1]);
  while (n > 1) {
    std::size_t best = 0;
    for (std::size_t i = 1; i + 1 < n; ++i)
      if (pairs[i].rank < pairs[best].rank) best = i;
    if (pairs[best].rank == MergeTable::kNone) break;
    ids[best] = pairs[best].joined;
    std::copy(ids.begin() + static_cast<std::ptrdiff_t>(best) + 2,
              ids.begin() + static_cast<std::ptrdiff_t>(n),
              ids.begin() + static_cast<std::ptrdiff_t>(best) + 1);
    std::copy(pairs + best + 2, pairs + std::max(n - 1, best + 2), pairs + best + 1);
    --n;
    if (best > 0) pairs[best - 1] = merges.find(ids[best - 1], ids[best]);
    if (best + 1 < n) pairs[best] = merges.find(ids[best], ids[best + 1]);
  }
  ids.resize(n);
}

// For long ones: a queue of the pairs, in which those that are no more are passed over.
void merge_long(const MergeTable& merges, std::vector<std::uint32_t>& ids) {
  constexpr std::uint32_t kEnd = 0xffffffff;
  struct Link {
    std::uint32_t before, after;
  };
  struct Pair {
    std::uint32_t rank, left, left_id, right_id, joined;
    bool operator<(const Pair& other) const {  // a queue gives its largest
      return rank != other.rank ? rank > other.rank : left > other.left;
    }
  };
  const auto n = static_cast<std::uint32_t>(ids.size());
  std::vector<Link> links(n);
  for (std::uint32_t i = 0; i < n; ++i) links[i] = {i - 1, i + 1 < n ? i + 1 : kEnd};
  links[0].before = kEnd;
  constexpr std::uint32_t kGone = 0xffffffff;  // the id of what was joined to its left
  std::priority_queue<Pair> queue;
  const auto push = [&](std::uint32_t left) {
    const std::uint32_t right = links[left].after;
    if (right == kEnd) return;
    const auto merge = merges.find(ids[left], ids[right]);
    if (merge.rank != MergeTable::kNone)
      queue.push({merge.rank, left, ids[left], ids[right], merge.joined});
  };
  for (std::uint32_t i = 0; i + 1 < n; ++i) push(i);
  while (!queue.empty()) {
    const Pair pair = queue.top();
    queue.pop();
    const std::uint32_t left = pair.left, right = links[left].after;
    if (ids[left] != pair.left_id || right == kEnd || ids[right] != pair.right_id) continue;
    ids[left] = pair.joined;
    ids[right] = kGone;
    links[left].after = links[right].after;
    if (links[left].after != kEnd) links[links[left].after].before = left;
    if (links[left].before != kEnd) push(links[left].before);
    push(left);
  }
  std::erase(ids, kGone);
}

}  // namespace

void merge_by_rank(const MergeTable& merges, std::vector<std::uint32_t>& ids) {
  if (ids.size() < 2) return;
  if (ids.size() <= 64) {
    merge_short(merges, ids);
  } else {
    merge_long(merges, ids);
  }
}

// ---- by score ----

void merge_by_score(const ScoredTokens& tokens, std::string_view text,
                    std::vector<ScoredPiece>& pieces) {
  constexpr std::uint32_t kEnd = 0xffffffff;
  struct Piece {
    std::uint32_t begin, size, before, after;
  };
  struct Pair {
    float score;
    std::uint32_t left, right, size;
    bool operator<(const Pair& other) const {
      return score != other.score ? score < other.score : left > other.left;
    }
  };
  pieces.clear();
  std::vector<Piece> all;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t size = std::min(claimed_length(text[at]), text.size() - at);
    const auto i = static_cast<std::uint32_t>(all.size());
    all.push_back({static_cast<std::uint32_t>(at), static_cast<std::uint32_t>(size), i - 1, i + 1});
    at += size;
  }
  if (all.empty()) return;
  all.front().before = kEnd;
  all.back().after = kEnd;
  const auto find = [&](std::uint32_t begin, std::uint32_t size) {
    return tokens.index->find(tokens.texts, text.substr(begin, size));
  };
  std::priority_queue<Pair> queue;
  const auto push = [&](std::uint32_t left, std::uint32_t right) {
    if (left == kEnd || right == kEnd) return;
    const std::uint32_t size = all[left].size + all[right].size;
    const std::int64_t id = find(all[left].begin, size);
    if (id >= 0) queue.push({tokens.scores[static_cast<std::size_t>(id)], left, right, size});
  };
  for (std::uint32_t i = 1; i < all.size(); ++i) push(i - 1, i);
  while (!queue.empty()) {
    const Pair pair = queue.top();
    queue.pop();
    Piece &left = all[pair.left], &right = all[pair.right];
    if (left.size == 0 || right.size == 0 || left.size + right.size != pair.size) continue;
    left.size = pair.size;
    right.size = 0;
    left.after = right.after;
    if (right.after != kEnd) all[right.after].before = pair.left;
    push(left.before, pair.left);
    push(pair.left, left.after);
  }
  for (std::uint32_t i = 0; i != kEnd; i = all[i].after)
    pieces.push_back({text.substr(all[i].begin, all[i].size), find(all[i].begin, all[i].size)});
}

}  // namespace bittern::text
