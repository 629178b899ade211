// Which tokens a query sees, and where they lie: shared by the kernels of aura_attention.
#pragma once
#include <algorithm>

#include "bittern/ops/aura_attention.h"
#include "core/host_device.h"

namespace bittern::aura {

enum Region { kFirst, kCoded, kRecent, kRegions };

struct Span {
  std::int64_t begin = 0, end = 0;
  BITTERN_HOST_DEVICE bool empty() const { return begin >= end; }
  bool operator==(const Span&) const = default;
};

// One sequence's share of `lengths` and `starts`.
struct Sequence {
  std::int64_t tokens[kRegions];
  std::int64_t start[kRegions];  // the slot of a region's first token
  std::int64_t slots[kRegions];  // after which slots begin anew

  // Every region full.
  BITTERN_HOST_DEVICE explicit Sequence(const AuraAttentionDesc& d)
      : tokens{d.first, d.capacity, d.recent}, start{}, slots{d.first, d.capacity, d.recent} {}
  Sequence(const AuraAttentionDesc& d, const AuraAttention::Args& a, std::int64_t s) : Sequence(d) {
    if (a.lengths) std::copy_n(a.lengths.as<std::int32_t>() + s * kRegions, kRegions, tokens);
    if (a.starts) std::copy_n(a.starts.as<std::int32_t>() + s * 2, 2, start + kCoded);
  }
  BITTERN_HOST_DEVICE std::int64_t total() const {
    return tokens[kFirst] + tokens[kCoded] + tokens[kRecent];
  }
  BITTERN_HOST_DEVICE std::int64_t slot(Region region, std::int64_t token) const {
    const std::int64_t at = start[region] + token;
    return at < slots[region] ? at : at - slots[region];
  }
  // The tokens of `region`, counted from its first, that the query sees.
  BITTERN_HOST_DEVICE Span seen(const AuraAttentionDesc& d, std::int64_t query,
                                Region region) const {
    std::int64_t base = 0;
    for (int r = kFirst; r < region; ++r) base += tokens[r];
    const std::int64_t position = total() - d.queries + query;
    const bool windowed = d.window > 0 && !(region == kFirst && d.window_keeps_first);
    const std::int64_t begin = windowed ? position + 1 - d.window : 0;
    const std::int64_t end = d.causal ? position + 1 : total();
    return {std::max<std::int64_t>(begin - base, 0), std::min(end - base, tokens[region])};
  }
};

// Slot `slot` of KV head `head` in first or recent tokens, in elements. Their first axis, sequences
// and KV heads, may be several.
inline std::int64_t exact_offset(const AuraAttentionDesc& d, const ConstView& view, std::int64_t s,
                                 std::int64_t head, std::int64_t slot) {
  std::int64_t row = s * d.kv_heads + head, at = slot * view.stride[view.shape.rank - 2];
  for (int i = view.shape.rank - 3; i >= 0; row /= view.shape[i--])
    at += row % view.shape[i] * view.stride[i];
  return at;
}
inline std::int64_t exact_stride(const ConstView& view) { return view.stride[view.shape.rank - 2]; }

// Row `slot` of KV head `head`, counted in rows of a [.., rows, row] operand of the layout.
inline std::int64_t row_offset(const AuraAttentionDesc& d, const ConstView& view,
                               const ConstView& block_table, std::int64_t s, std::int64_t head,
                               std::int64_t slot, std::int64_t row) {
  if (d.page_size == 0) return (s * d.kv_heads + head) * view.row_stride() + slot * row;
  const std::int64_t page =
      block_table.as<std::int32_t>()[s * block_table.row_stride() + slot / d.page_size];
  return page * view.row_stride() + (head * d.page_size + slot % d.page_size) * row;
}

}  // namespace bittern::aura
