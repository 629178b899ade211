// How strided tensors lie in memory: the order of their axes, and whether two share a byte.
#pragma once
#include <array>
#include <cstddef>

#include "bittern/tensor.h"

namespace bittern::plan_detail {

// Axes in the order of their strides. std::sort of so few makes gcc 12 warn of a bound it keeps.
class AxesByStride {
 public:
  void add(int axis, const Shape& stride) {
    std::size_t place = count_++;
    for (; place > 0 && stride[axis] < stride[axes_[place - 1]]; --place)
      axes_[place] = axes_[place - 1];
    axes_[place] = axis;
  }
  const int* begin() const { return axes_.data(); }
  const int* end() const { return axes_.data() + count_; }

 private:
  std::array<int, kMaxRank> axes_{};
  std::size_t count_ = 0;
};

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
