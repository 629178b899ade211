// Tiles of f32 in scratch, made from and stored to tensors of any float dtype but f64. A tile's
// rows are whole vectors (matmul::Padded); loading fills the padding with zeros. Per-target include
// guard, as Highway's own -inl.h files have.
#if defined(BITTERN_CPU_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_CPU_TILE_INL_H_
#undef BITTERN_CPU_TILE_INL_H_
#else
#define BITTERN_CPU_TILE_INL_H_
#endif

#include "cpu/matmul-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace tile {

using matmul::D;
using matmul::kLanes;
using matmul::Padded;
using matmul::V;

// Calls f(Type<X>{}) for the X that `dtype` names; descriptors admit no other.
template <class F>
HWY_INLINE void WithElement(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f16: f(Type<f16>{}); break;
    case DType::bf16: f(Type<bf16>{}); break;
    default: f(Type<float>{});
  }
}

// Row r of the tile is `columns` elements from + r * from_stride.
template <class X>
void LoadAs(const X* from, std::int64_t from_stride, std::int64_t rows, std::int64_t columns,
            float* to, std::int64_t stride) {
  const D d;
  for (std::int64_t r = 0; r < rows; ++r, from += from_stride, to += stride) {
    std::int64_t j = 0;
    for (; j + kLanes <= columns; j += kLanes) hn::StoreU(LoadMath(d, from + j), d, to + j);
    if (j == columns) continue;
    hn::StoreU(hn::Zero(d), d, to + j);
    for (; j < columns; ++j) to[j] = to_math(from[j]);
  }
}

template <class X>
void StoreAs(const float* from, std::int64_t stride, std::int64_t rows, std::int64_t columns, X* to,
             std::int64_t to_stride) {
  const D d;
  for (std::int64_t r = 0; r < rows; ++r, from += stride, to += to_stride) {
    std::int64_t j = 0;
    for (; j + kLanes <= columns; j += kLanes) StoreMath(d, hn::LoadU(d, from + j), to + j);
    for (; j < columns; ++j) to[j] = from_math<X>(from[j]);
  }
}

// The same from and to element `first` of a tensor.
inline void Load(const ConstView& x, std::int64_t first, std::int64_t from_stride,
                 std::int64_t rows, std::int64_t columns, float* to, std::int64_t stride) {
  WithElement(x.dtype, [&]<class X>(Type<X>) HWY_ATTR {
    LoadAs(x.as<X>() + first, from_stride, rows, columns, to, stride);
  });
}
inline void Store(const float* from, std::int64_t stride, std::int64_t rows, std::int64_t columns,
                  const MutView& x, std::int64_t first, std::int64_t to_stride) {
  WithElement(x.dtype, [&]<class X>(Type<X>) HWY_ATTR {
    StoreAs(from, stride, rows, columns, x.as<X>() + first, to_stride);
  });
}

// Elements rounded to the dtype and back.
inline void Round(DType dtype, float* x, std::int64_t stride, std::int64_t rows,
                  std::int64_t columns) {
  if (dtype == DType::f32) return;
  WithElement(dtype, [&]<class X>(Type<X>) HWY_ATTR {
    const D d;
    for (std::int64_t r = 0; r < rows; ++r, x += stride) {
      for (std::int64_t j = 0; j < columns; j += kLanes)
        hn::StoreU(RoundMath<X>(d, hn::LoadU(d, x + j)), d, x + j);
    }
  });
}

// Row r times factor[r].
inline void ScaleRows(const float* factor, float* x, std::int64_t stride, std::int64_t rows,
                      std::int64_t columns) {
  const D d;
  for (std::int64_t r = 0; r < rows; ++r, x += stride) {
    const V f = hn::Set(d, factor[r]);
    for (std::int64_t j = 0; j < columns; j += kLanes)
      hn::StoreU(hn::Mul(hn::LoadU(d, x + j), f), d, x + j);
  }
}

// n elements times `factor`.
inline void Scale(float factor, float* x, std::int64_t n) {
  const D d;
  const V f = hn::Set(d, factor);
  for (std::int64_t i = 0; i < n; i += kLanes)
    hn::StoreU(hn::Mul(hn::LoadU(d, x + i), f), d, x + i);
}

// x = x - y
inline void Subtract(float* x, const float* y, std::int64_t stride, std::int64_t rows,
                     std::int64_t columns) {
  const D d;
  for (std::int64_t r = 0; r < rows; ++r, x += stride, y += stride) {
    for (std::int64_t j = 0; j < columns; j += kLanes)
      hn::StoreU(hn::Sub(hn::LoadU(d, x + j), hn::LoadU(d, y + j)), d, x + j);
  }
}

// to[j][i] = x[i][j]; rows of `to` are filled up with zeros to whole vectors. T has 4 bytes.
template <class T>
void Transpose(const T* x, std::int64_t stride, std::int64_t rows, std::int64_t columns, T* to,
               std::int64_t to_stride) {
  // Squares of 4 x 4, 16 of them after one another, so that lines are written whole.
  constexpr std::int64_t kBlock = 16;
  const hn::FixedTag<T, 4> d;
  for (std::int64_t first = 0; first < rows; first += kBlock) {
    const std::int64_t last = std::min(rows, first + kBlock);
    for (std::int64_t j = 0; j < columns; j += 4) {
      if (j + 4 > columns) {
        for (std::int64_t i = first; i < last; ++i)
          for (std::int64_t c = j; c < columns; ++c) to[c * to_stride + i] = x[i * stride + c];
        continue;
      }
      std::int64_t i = first;
      for (; i + 4 <= last; i += 4) {
        const T* from = x + i * stride + j;
        T* out = to + j * to_stride + i;
        const auto r0 = hn::LoadU(d, from), r1 = hn::LoadU(d, from + stride);
        const auto r2 = hn::LoadU(d, from + 2 * stride), r3 = hn::LoadU(d, from + 3 * stride);
        const auto even0 = hn::InterleaveLower(d, r0, r2), odd0 = hn::InterleaveLower(d, r1, r3);
        const auto even1 = hn::InterleaveUpper(d, r0, r2), odd1 = hn::InterleaveUpper(d, r1, r3);
        hn::StoreU(hn::InterleaveLower(d, even0, odd0), d, out);
        hn::StoreU(hn::InterleaveUpper(d, even0, odd0), d, out + to_stride);
        hn::StoreU(hn::InterleaveLower(d, even1, odd1), d, out + 2 * to_stride);
        hn::StoreU(hn::InterleaveUpper(d, even1, odd1), d, out + 3 * to_stride);
      }
      for (; i < last; ++i)
        for (std::int64_t c = j; c < j + 4; ++c) to[c * to_stride + i] = x[i * stride + c];
    }
  }
  for (std::int64_t j = 0; j < columns; ++j)
    std::fill(to + j * to_stride + rows, to + j * to_stride + Padded(rows), T{});
}

// Of the lanes j, j + 1, ... those below `end`.
HWY_INLINE hn::Mask<D> Before(std::int64_t j, std::int64_t end) {
  return hn::FirstN(D(), static_cast<std::size_t>(std::clamp<std::int64_t>(end - j, 0, kLanes)));
}

}  // namespace tile
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif
#endif
