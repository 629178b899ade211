// What the cpu kernels of aura_attention work on: tasks, and where a query row keeps its query, its
// state and its splits' sums.
#pragma once
#include <algorithm>
#include <cstdint>

#include "ops/aura/aura_attention/walk.h"

namespace bittern::aura {

// Rows are handled in units of 16 elements, one per accumulator. A row kept exactly has element j
// in unit j / 16; a coded row has it in unit j / 128 * 8 + j % 8, lane j / 8 % 16, since 8 codes of
// a bit stream are whole bytes, which one lane takes apart.
inline constexpr std::int64_t kUnit = 16, kBlock = 8;  // elements of a unit, units of a block
inline constexpr std::int64_t kSplit = AuraAttentionDesc::kSplit;
inline constexpr std::int64_t kRowsAtOnce = 16;  // query rows that pass over a split together
// Rows of a KV head from which on a split is converted to f32 for all of them (block-inl.h).
inline constexpr std::int64_t kManyRows = 10;

constexpr std::int64_t round_up(std::int64_t n, std::int64_t m) { return (n + m - 1) / m * m; }

// A split of a task: the region, and its number there.
struct SplitOfTask {
  std::int64_t task;
  Region region;
  std::int64_t split;
};

// What the work is made of: a task is a KV head with a block of queries; each query row of a task
// (a query and one of the heads) has a record. Where tasks are few, records and the sums of their
// splits are kept in the workspace. Otherwise a thread works on one task at a time, and the records
// of that task are in the thread's slot of the workspace.
struct Work {
  const AuraAttentionDesc& d;
  const AuraAttention::Args& a;
  bool int8;
  float* records;
  float* partials;  // of each record and split, where tasks are few
  float* slots;

  std::int64_t exact_length() const { return round_up(d.dim, kUnit); }
  std::int64_t coded_length() const {
    return d.capacity == 0 ? 0 : round_up(d.dim, kUnit * kBlock);
  }
  std::int64_t longer_length() const { return std::max(exact_length(), coded_length()); }
  bool many_rows() const { return d.queries * d.group() >= kManyRows; }
  std::int64_t queries_at_once() const {
    // Of many rows as many as pay for the conversion, but enough tasks for the threads.
    const std::int64_t rows =
        many_rows() ? std::clamp<std::int64_t>(this->rows() / 64, 48, 384) : kRowsAtOnce;
    const std::int64_t most = std::max<std::int64_t>(rows / d.group(), 1);
    const std::int64_t blocks = std::max<std::int64_t>((d.queries + most - 1) / most, 1);
    return std::max<std::int64_t>((d.queries + blocks - 1) / blocks, 1);  // evenly
  }
  std::int64_t task_rows() const { return queries_at_once() * d.group(); }
  std::int64_t query_blocks() const {
    const std::int64_t n = queries_at_once();
    return (d.queries + n - 1) / n;
  }
  std::int64_t tasks() const { return d.sequences * d.kv_heads * query_blocks(); }
  std::int64_t rows() const { return d.sequences * d.queries * d.heads; }
  std::int64_t splits(Region region) const {
    const std::int64_t tokens[] = {d.first, d.capacity, d.recent};
    return (tokens[region] + kSplit - 1) / kSplit;
  }
  std::int64_t all_splits() const { return splits(kFirst) + splits(kCoded) + splits(kRecent); }
  bool by_split() const {
    return tasks() < 16 && rows() <= 1024 && all_splits() > 1 && all_splits() < (1 << 20);
  }
  std::int64_t record_length() const {
    return 2 * exact_length() + 2 * coded_length() + kUnit + (int8 ? coded_length() / 2 : 0);
  }
  std::int64_t partial_length() const { return kUnit + longer_length(); }
  std::int64_t partials_length() const {
    return by_split() ? rows() * all_splits() * partial_length() : 0;
  }
  // Many rows: the split's K and V as f32, the queries transposed, logits; and the task's records.
  std::int64_t tiles_length() const {
    if (!many_rows()) return 0;
    return (2 * kSplit + round_up(task_rows(), kUnit)) * longer_length() + kSplit * kUnit;
  }
  std::int64_t slot_length() const {
    return tiles_length() + (by_split() ? 0 : task_rows() * record_length());
  }
  std::int64_t shared_length() const {
    return by_split() ? rows() * record_length() + partials_length() : 0;
  }
  float* slot(std::int64_t index) const { return slots + index * slot_length(); }
  float* record(std::int64_t row) const { return records + row * record_length(); }
  float* partial(std::int64_t row, const SplitOfTask& at) const {
    std::int64_t split = at.split;
    for (int region = kFirst; region < at.region; ++region)
      split += splits(static_cast<Region>(region));
    return partials + (row * all_splits() + split) * partial_length();
  }
};

// A record: the query in both bases, the state it is merged into, and the query as bytes.
struct Record {
  float *a, *r, *o_exact, *o_coded;
  float &m, &l, &l_coded, &b;
  float &byte_unit, &byte_offset;  // of r: the value of 1, and what c's offset of 128 adds up to
  std::int8_t* bytes;

  Record(const Work& w, std::int64_t row) : Record(w, w.record(row)) {}

 private:
  Record(const Work& w, float* at)
      : a(at),
        r(a + w.exact_length()),
        o_exact(r + w.coded_length()),
        o_coded(o_exact + w.exact_length()),
        m(o_coded[w.coded_length()]),
        l((&m)[1]),
        l_coded((&m)[2]),
        b((&m)[3]),
        byte_unit((&m)[4]),
        byte_offset((&m)[5]),
        bytes(reinterpret_cast<std::int8_t*>(&m + kUnit)) {}
};

// A split's sums for one row: m, l, whether a token was seen, then o.
struct Partial {
  float &m, &l, &seen;
  float* o;
  explicit Partial(float* at) : m(at[0]), l(at[1]), seen(at[2]), o(at + kUnit) {}
};

}  // namespace bittern::aura
