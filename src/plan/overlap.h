// Whether two strided tensors share a byte.
#pragma once
#include <cstddef>

#include "bittern/tensor.h"

namespace bittern::plan_detail {

// A tensor in memory: elements of `size` bytes, `stride` of them from one index to the next.
struct Memory {
  const void* data;
  std::size_t size;
  const Shape* shape;
  const Shape* stride;
};

// Exact for tensors of rows, whatever their strides, and for axes that nest; where the strides of
// two tensors are so many and so odd that the search would take too long, the answer is yes. So no
// overlap is ever missed.
bool overlap(const Memory& a, const Memory& b);

}  // namespace bittern::plan_detail
