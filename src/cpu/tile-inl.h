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

}  // namespace tile
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif
#endif
