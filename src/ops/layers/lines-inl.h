// Rows taken a vector at a time, whatever their length: what the ops on rows share.
#if defined(BITTERN_CPU_LINES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_CPU_LINES_INL_H_
#undef BITTERN_CPU_LINES_INL_H_
#else
#define BITTERN_CPU_LINES_INL_H_
#endif

#include "cpu/dot-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace lines {

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
  // The upper halves of the lanes.
  HWY_INLINE void StoreUpper(hn::Vec<hn::RebindToUnsigned<DotTag>> v, bf16* row) const {
    const hn::Rebind<std::uint16_t, DotTag> dh;
#if HWY_TARGET <= HWY_AVX3
    const hn::Repartition<std::uint16_t, DotTag> d16;
    const auto words = hn::BitCast(d16, v);
    const auto upper = hn::LowerHalf(dh, hn::ConcatOdd(d16, words, words));
#else
    const auto upper = hn::TruncateTo(dh, hn::ShiftRight<16>(v));
#endif
    if constexpr (kWhole) {
      hn::StoreU(upper, dh, reinterpret_cast<std::uint16_t*>(row + at));
    } else {
      bf16 padded[kDotVector];
      hn::StoreU(upper, dh, reinterpret_cast<std::uint16_t*>(padded));
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

struct Lines {
  std::int64_t dim;

  template <class F>
  HWY_INLINE void Each(const F& f) const {
    std::int64_t j = 0;
    for (; j + kDotVector <= dim; j += kDotVector) f(Part<true>{j, kDotVector});
    if (j < dim) f(Part<false>{j, dim - j});
  }
  // f(part, part, part, part) while there are four whole ones, then f(part) for each of the rest.
  template <class F>
  HWY_INLINE void EachFour(const F& f) const {
    std::int64_t j = 0;
    const auto whole = [&](std::int64_t i) { return Part<true>{j + i * kDotVector, kDotVector}; };
    for (; j + 4 * kDotVector <= dim; j += 4 * kDotVector)
      f(whole(0), whole(1), whole(2), whole(3));
    for (; j + kDotVector <= dim; j += kDotVector) f(whole(0));
    if (j < dim) f(Part<false>{j, dim - j});
  }
  // The dot product (core/dot.h) of what `terms` gives for each part: a pair of vectors.
  template <class F>
  HWY_INLINE float Sum(const F& terms) const {
    return LaneTree(DotTag(), Lanes(terms), kDotVector);
  }
  // The same before the tree inside the vector.
  template <class F>
  HWY_INLINE V Lanes(const F& terms) const {
    const DotTag d;
    V sum[kDotParts];
    for (V& s : sum) s = hn::Zero(d);
    const auto add = [&](auto part, V& s) HWY_ATTR {
      V a, b;
      terms(part, a, b);
      s = part.Only(hn::MulAdd(a, b, s), s);
    };
    std::int64_t j = 0;
    for (; j + kDotLanes <= dim; j += kDotLanes)
      for (int p = 0; p < kDotParts; ++p) add(Part<true>{j + p * kDotVector, kDotVector}, sum[p]);
    for (int p = 0; p < kDotParts && j < dim; ++p, j += kDotVector) {
      if (j + kDotVector <= dim) {
        add(Part<true>{j, kDotVector}, sum[p]);
      } else {
        add(Part<false>{j, dim - j}, sum[p]);
      }
    }
    return JoinDot(sum);
  }
};

}  // namespace lines
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif
#endif
