// Work that processes share (bittern/ranks.h). Whatever is exchanged comes after an agree(), so
// that a process that has failed keeps none of the others waiting.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "bittern/ranks.h"
#include "bittern/status.h"
#include "core/packer.h"

namespace bittern {

inline int rank_of(const Ranks* ranks) { return ranks != nullptr ? ranks->rank() : 0; }
inline int count_of(const Ranks* ranks) { return ranks != nullptr ? ranks->count() : 1; }
inline Status agree(Ranks* ranks, const Status& own) {
  return ranks != nullptr ? ranks->agree(own) : own;
}

// The same for what a call returns.
template <class T>
Result<T> agreed(Ranks* ranks, Result<T> own) {
  if (Status status = agree(ranks, own.status()); !status.ok()) return status;
  return own;
}

// ---- items that are dealt out ----

// make(i, packer) for each i in [0, items): processes take them in turn, and one makes one at a
// time. take(i, unpacker) gets what was made, in order: in process 0, or in all of them.
enum class DealTo { first, all };
template <class Make, class Take>
Status deal(Ranks* ranks, std::int64_t items, DealTo to, const Make& make, const Take& take) {
  const std::int64_t rank = rank_of(ranks), count = count_of(ranks);
  Packer own;
  std::vector<std::vector<std::byte>> all;
  Status status;
  for (std::int64_t first = 0; first < items; first += count) {
    own.clear();
    if (status.ok() && first + rank < items) status = make(first + rank, own);
    BITTERN_TRY(agree(ranks, status));
    if (ranks == nullptr) {
      status = take(first, Unpacker(own.bytes()));
      continue;
    }
    status = to == DealTo::all ? ranks->gather(own.bytes(), all) : ranks->collect(own.bytes(), all);
    for (std::size_t i = 0; i < all.size() && status.ok(); ++i) {
      const std::int64_t item = first + static_cast<std::int64_t>(i);
      if (item < items) status = take(item, Unpacker(all[i]));
    }
  }
  return agree(ranks, status);
}

// `runs` equal pieces of work in contiguous items: one for one process; else some for each, of at
// most `most` runs.
struct RunItems {
  std::int64_t items, length;  // runs of an item; the last may have fewer
};
inline RunItems items_of_runs(const Ranks* ranks, std::int64_t runs, std::int64_t most) {
  if (runs == 0) return {0, 1};
  if (ranks == nullptr) return {1, runs};
  const std::int64_t count = ranks->count();
  const std::int64_t rounds = (runs + most * count - 1) / (most * count);
  const std::int64_t length = (runs + rounds * count - 1) / (rounds * count);
  return {(runs + length - 1) / length, length};
}

}  // namespace bittern
