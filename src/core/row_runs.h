// Rows that lie anywhere: what an operand with Operand::kRowAxes may have.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

#include "bittern/tensor.h"

namespace bittern {

// The rows of a view that has several axes of any strides for them: runs of rows at equal
// distances.
class RowRuns {
 public:
  RowRuns() = default;
  // The last `inner` axes are a row's.
  RowRuns(const Shape& shape, const Shape& stride, int inner) {
    for (int i = 0; i < shape.rank - inner; ++i) {
      if (shape[i] == 1) continue;
      // An axis that goes on where the one before it steps to is the same run.
      if (axes_ > 0 && stride_[axes_ - 1] == shape[i] * stride[i]) {
        length_[axes_ - 1] *= shape[i];
        stride_[axes_ - 1] = stride[i];
        continue;
      }
      length_[axes_] = shape[i];
      stride_[axes_++] = stride[i];
    }
  }
  // How many rows are at equal distances, from any multiple of this number on; 0: all.
  std::int64_t length() const { return axes_ == 0 ? 0 : length_[axes_ - 1]; }
  std::int64_t stride() const { return axes_ == 0 ? 0 : stride_[axes_ - 1]; }
  bool whole() const { return axes_ <= 1; }
  // Elements from the first row to this one.
  std::int64_t offset(std::int64_t row) const {
    if (whole()) return row * stride();
    std::int64_t elements = 0;
    for (std::size_t i = axes_; i-- > 0; row /= length_[i])
      elements += row % length_[i] * stride_[i];
    return elements;
  }

 private:
  std::size_t axes_ = 0;
  std::array<std::int64_t, kMaxRank> length_{}, stride_{};
};

}  // namespace bittern
