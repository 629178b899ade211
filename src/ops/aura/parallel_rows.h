// How rows of the KV codec are shared among threads; the arithmetic is in rotate-inl.h.
#pragma once
#include <algorithm>

#include "bittern/aura_desc.h"
#include "cpu/parallel.h"

namespace bittern::cpu {

// Rows that are taken together on every SIMD target.
inline constexpr std::int64_t kRowsAtOnce = 16;

// f(begin, end) on ranges of d's rows.
template <class F>
void parallel_rows(const AuraDesc& d, F&& f) {
  const std::int64_t work = d.rotation == Rotation::dense ? d.dim * d.dim / 8 : 4 * d.dim;
  parallel(d.rows, kGrain / std::max<std::int64_t>(work, 1), f, kRowsAtOnce);
}

}  // namespace bittern::cpu
