// The elements that share a parameter.
#pragma once
#include "bittern/quantize_desc.h"

namespace bittern {

// f(row, position in the row) for each element of parameter p, in the order sums take them.
template <class F>
void for_each_element(const GroupGeometry& g, std::int64_t p, F&& f) {
  const bool own_row = g.param_step != 0;
  const std::int64_t first_row = own_row ? p / g.param_step : 0;
  const std::int64_t end_row = own_row ? first_row + 1 : g.rows;
  const std::int64_t begin = (own_row ? p % g.param_step : p) * g.run;
  const std::int64_t end = begin + g.run < g.row_length ? begin + g.run : g.row_length;
  for (std::int64_t i = first_row; i < end_row; ++i)
    for (std::int64_t j = begin; j < end; ++j) f(i, j);
}

}  // namespace bittern
