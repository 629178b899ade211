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

// Never misses an overlap. "No" is found too, whatever divisor the strides have in common, as
// slices of one buffer have. The question in general is a subset sum with a term for each axis, so
// the search ends after 65,536 steps (milliseconds) and then answers yes. Reaching that takes two
// tensors that both weave their own axes into each other, by strides without a common divisor, with
// 50 or more elements on each of three axes; an output's axes nest.
bool overlap(const Memory& a, const Memory& b);

}  // namespace bittern::plan_detail
