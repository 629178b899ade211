// The end of every elementwise op of the quantise family: its elements shared out over threads.
#pragma once
#include <cstdint>

#include "bittern/quantize_desc.h"
#include "cpu/parallel.h"

namespace bittern::cpu {

// kernel(d, a, begin, end) on ranges of elements. They begin at multiples of 64, so that of bytes
// and longer elements no two threads write the same line.
template <class Args>
Status run_elements(const QuantizeDesc& d, const Args& a,
                    void (&kernel)(const QuantizeDesc&, const Args&, std::int64_t, std::int64_t)) {
  const GroupGeometry g = d.geometry();
  parallel(
      g.rows * g.row_length, kGrain,
      [&](std::int64_t begin, std::int64_t end) { kernel(d, a, begin, end); }, 64);
  return {};
}

}  // namespace bittern::cpu
