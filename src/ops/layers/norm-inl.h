// What gated_rms_norm and its backward share: rows taken a vector at a time, whatever their length.
#if defined(BITTERN_CPU_NORM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_CPU_NORM_INL_H_
#undef BITTERN_CPU_NORM_INL_H_
#else
#define BITTERN_CPU_NORM_INL_H_
#endif

#include "bittern/norm_desc.h"
#include "cpu/dot-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace norm {

using V = hn::Vec<DotTag>;

// Elements [at, at + count) of a row; count is a whole vector, or fewer at the end.
template <bool kWhole>
struct Part {
  std::int64_t at, count;

  template <class X>
  HWY_INLINE V Load(const X* row) const {
    const DotTag d;
    if constexpr (kWhole) {
      return LoadMath(d, row + at);
    } else {
      X padded[kDotVector] = {};
      std::copy_n(row + at, count, padded);
      return LoadMath(d, padded);
    }
  }
  template <class X>
  HWY_INLINE void Store(V v, X* row) const {
    const DotTag d;
    if constexpr (kWhole) {
      StoreMath(d, v, row + at);
    } else {
      X padded[kDotVector];
      StoreMath(d, v, padded);
      std::copy_n(padded, count, row + at);
    }
  }
  // Lanes past the end keep `before`.
  HWY_INLINE V Only(V v, V before) const {
    if constexpr (kWhole) {
      return v;
    } else {
      return hn::IfThenElse(hn::FirstN(DotTag(), static_cast<std::size_t>(count)), v, before);
    }
  }
};

template <class X>
struct Lines {
  std::int64_t dim;

  template <class F>
  HWY_INLINE void Each(const F& f) const {
    std::int64_t j = 0;
    for (; j + kDotVector <= dim; j += kDotVector) f(Part<true>{j, kDotVector});
    if (j < dim) f(Part<false>{j, dim - j});
  }
  // The dot product (core/dot.h) of what `terms` gives for each part: a pair of vectors.
  template <class F>
  HWY_INLINE float Sum(const F& terms) const {
    const DotTag d;
    V sum[kDotParts];
    for (V& s : sum) s = hn::Zero(d);
    Each([&](auto part) HWY_ATTR {
      V a, b;
      terms(part, a, b);
      V& s = sum[part.at / kDotVector % kDotParts];
      s = part.Only(hn::MulAdd(a, b, s), s);
    });
    return LaneTree(d, JoinDot(sum), kDotVector);
  }
};

template <class X>
HWY_INLINE float Rstd(const GatedNormDesc& d, const X* x) {
  const float squares =
      Lines<X>{d.dim}.Sum([&](auto part, V& a, V& b) HWY_ATTR { a = b = part.Load(x); });
  return 1.0f / std::sqrt(squares / static_cast<float>(d.dim) + static_cast<float>(d.eps));
}

}  // namespace norm
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif
#endif
