// Whether two strided tensors share a byte.
#pragma once
#include <cstddef>

#include "bittern/tensor.h"

namespace bittern::plan_detail {

// A tensor in memory: elements of `size` bytes; strides count elements.
struct Memory {
  const void* data;
  std::size_t size;
  const Shape* shape;
  const Shape* stride;
};

// Never misses an overlap. It also answers "no" correctly for strides with a common divisor, as
// slices of one buffer have. In general the question is a subset sum with a term for each axis, so
// the search ends after 65,536 steps (milliseconds) and then answers yes. To reach that limit, both
// tensors must interleave their own axes, with strides without a common divisor and 50 or more
// elements on each of three axes. The axes of an output cannot interleave.
bool overlap(const Memory& a, const Memory& b);

}  // namespace bittern::plan_detail
