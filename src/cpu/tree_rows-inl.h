// The halving tree over rows of partial sums, column by column, in place: row 0 becomes the sums.
#if defined(BITTERN_CPU_TREE_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_CPU_TREE_ROWS_INL_H_
#undef BITTERN_CPU_TREE_ROWS_INL_H_
#else
#define BITTERN_CPU_TREE_ROWS_INL_H_
#endif

#include "cpu/reduce-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {

// Columns [begin, end) of `rows` rows, `stride` elements apart. Padding rows are +0, and are added
// wherever the tree adds them.
inline void TreeRows(float* partial, std::int64_t rows, std::int64_t stride, std::int64_t begin,
                     std::int64_t end) {
  const hn::ScalableTag<float> d;
  const auto half = static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(rows))) / 2;
  for (std::int64_t step = half; step > 0; step /= 2) {
    for (std::int64_t r = 0; r < std::min(step, rows); ++r) {
      float* to = partial + r * stride;
      if (r + step < rows) {
        AddTo(d, partial + (r + step) * stride + begin, end - begin, to + begin);
      } else {
        for (std::int64_t c = begin; c < end; ++c) to[c] += 0.0f;
      }
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif
#endif
