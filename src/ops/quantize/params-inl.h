// Scales, zero points and the clamp's ends of consecutive runs, loaded for the bodies of the
// quantise family: a run's in registers, or each element's own.
#if defined(BITTERN_OPS_QUANTIZE_PARAMS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_OPS_QUANTIZE_PARAMS_INL_H_
#undef BITTERN_OPS_QUANTIZE_PARAMS_INL_H_
#else
#define BITTERN_OPS_QUANTIZE_PARAMS_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "bittern/quantize_desc.h"
#include "ops/quantize/code_vectors-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {

inline constexpr std::int64_t kTile = 2048;        // elements a tile has at most
inline constexpr std::int64_t kTileRuns = 512;     // and runs
inline constexpr std::int64_t kDirectTile = 8192;  // elements, where none are buffered
inline constexpr std::int64_t kPiece = 256;        // computed between two bursts of stores
inline constexpr std::int64_t kOverrun = 16;       // bodies work in whole vectors of f32

// Zero points beyond this, or code ranges beyond twice this, are left to scalar code: f32 would
// round q_min - zp.
inline constexpr std::int32_t kFarZeroPoint = 1 << 22;

// The operands every op of the family has.
struct ParamTensors {
  const void* scale;
  DType scale_dtype;
  const std::int32_t* zero_point;  // null: all 0
  std::int32_t q_min, q_max;

  std::int32_t zero(std::int64_t i) const { return zero_point == nullptr ? 0 : zero_point[i]; }
  bool far_range() const { return q_min < -2 * kFarZeroPoint || q_max > 2 * kFarZeroPoint; }
};

// Parameters of consecutive runs (or, spread out, of consecutive elements).
template <class F>
struct RunParams {
  static constexpr std::size_t kSize = kTileRuns + kOverrun;
  alignas(64) F scale[kSize];
  alignas(64) F zero[kSize];
  alignas(64) F lo[kSize];  // q_min - zp
  alignas(64) F hi[kSize];  // q_max - zp
  bool any_far = false;     // some zp or the range is too far for F: see IsFar
};

template <class F>
bool IsFar(const ParamTensors& t, std::int32_t zero) {
  return sizeof(F) == 4 && (t.far_range() || zero > kFarZeroPoint || zero < -kFarZeroPoint);
}

template <class S, class F>
HWY_INLINE void LoadScales(const void* scale, std::int64_t first, std::int64_t count, F* to) {
  const hn::ScalableTag<F> d;
  constexpr std::int64_t kN = kLanes<F>;
  const S* from = static_cast<const S*>(scale) + first;
  std::int64_t i = 0;
  for (; i + kN <= count; i += kN) hn::StoreU(LoadMath(d, from + i), d, to + i);
  for (; i < count; ++i) to[i] = to_math(from[i]);
}

template <class F>
HWY_INLINE void LoadZeros(const ParamTensors& t, std::int64_t first, std::int64_t count,
                          std::int64_t at, RunParams<F>& p) {
  const hn::ScalableTag<F> d;
  const hn::Rebind<std::int32_t, decltype(d)> di;
  const hn::RebindToUnsigned<decltype(di)> du;
  auto farthest = hn::Zero(du);  // |INT32_MIN| is right without a sign
  std::int64_t i = 0;
  for (; i + kLanes<F> <= count; i += kLanes<F>) {
    const auto zero =
        t.zero_point == nullptr ? hn::Zero(di) : hn::LoadU(di, t.zero_point + first + i);
    farthest = hn::Max(farthest, hn::BitCast(du, hn::Abs(zero)));
    if constexpr (sizeof(F) == 4) {
      hn::StoreU(hn::ConvertTo(d, zero), d, p.zero + at + i);
    } else {
      hn::StoreU(hn::PromoteTo(d, zero), d, p.zero + at + i);
    }
  }
  if (sizeof(F) == 4)
    p.any_far |= t.far_range() ||
                 !hn::AllFalse(du, hn::Gt(farthest, hn::Set(du, std::uint32_t{kFarZeroPoint})));
  for (; i < count; ++i) {
    const std::int32_t zero = t.zero(first + i);
    p.zero[at + i] = static_cast<F>(zero);
    p.any_far |= IsFar<F>(t, zero);
  }
}

// Parameters first .. first + count - 1 into p.*[at ...].
template <class F>
void LoadParams(const ParamTensors& t, std::int64_t first, std::int64_t count, std::int64_t at,
                RunParams<F>& p) {
  if constexpr (sizeof(F) == 8) {
    LoadScales<double>(t.scale, first, count, p.scale + at);
  } else if (t.scale_dtype == DType::f32) {
    LoadScales<float>(t.scale, first, count, p.scale + at);
  } else if (t.scale_dtype == DType::bf16) {
    LoadScales<bf16>(t.scale, first, count, p.scale + at);
  } else {
    LoadScales<f16>(t.scale, first, count, p.scale + at);
  }
  LoadZeros(t, first, count, at, p);
}

// The clamp's ends, once scales and zero points are loaded. Lanes up to a whole vector are made
// harmless: what the stack holds may be subnormal, and slow.
template <class F>
HWY_INLINE void SetBounds(const ParamTensors& t, std::int64_t count, RunParams<F>& p) {
  const hn::ScalableTag<F> d;
  hn::StoreU(hn::Set(d, F(1)), d, p.scale + count);
  hn::StoreU(hn::Zero(d), d, p.zero + count);
  const auto q_min = hn::Set(d, static_cast<F>(t.q_min)),
             q_max = hn::Set(d, static_cast<F>(t.q_max));
  for (std::int64_t i = 0; i < count; i += kLanes<F>) {
    const auto zero = hn::Load(d, p.zero + i);
    hn::Store(hn::Sub(q_min, zero), d, p.lo + i);
    hn::Store(hn::Sub(q_max, zero), d, p.hi + i);
  }
}

// Inverse for every run; 0 for all unless scales are half too.
inline void SetInverses(const RunParams<float>& p, std::int64_t count, bool half_scales,
                        float* inverse) {
  const hn::ScalableTag<float> d;
  for (std::int64_t i = 0; i < count; i += kLanes<float>) {
    const auto r =
        Inverse(d, hn::Load(d, p.scale + i), hn::Load(d, p.lo + i), hn::Load(d, p.hi + i));
    hn::Store(half_scales ? r : hn::Zero(d), d, inverse + i);
  }
}

// The same parameters once per element: run k covers elements k * run - skip ..., clipped to [0,
// n).
template <class F>
void SpreadParams(const RunParams<F>& runs, std::int64_t run, std::int64_t skip, std::int64_t n,
                  RunParams<F>& elements) {
  const hn::ScalableTag<F> d;
  const auto spread = [&](const F* from, F* to) HWY_ATTR {
    std::int64_t end = run - skip;
    for (std::int64_t i = 0, k = 0; i < n; i = end, end += run, ++k) {
      const auto v = hn::Set(d, from[k]);
      for (std::int64_t j = i; j < std::min(end, n); j += kLanes<F>) hn::StoreU(v, d, to + j);
    }
  };
  spread(runs.scale, elements.scale);
  spread(runs.zero, elements.zero);
  spread(runs.lo, elements.lo);
  spread(runs.hi, elements.hi);
}

template <class D>
struct ParamVectors {
  hn::Vec<D> scale, zero, lo, hi;
};

// Where a body takes parameters from: one run's, in registers ...
template <class D>
struct OneRun {
  ParamVectors<D> v;
  std::int64_t k;  // which of the tile's runs
  HWY_INLINE OneRun(const RunParams<hn::TFromD<D>>& p, std::int64_t index)
      : v{hn::Set(D(), p.scale[index]), hn::Set(D(), p.zero[index]), hn::Set(D(), p.lo[index]),
          hn::Set(D(), p.hi[index])},
        k(index) {}
  HWY_INLINE const ParamVectors<D>& At(std::int64_t) const { return v; }
};
// ... or each element's own, from memory.
template <class D>
struct PerElement {
  const RunParams<hn::TFromD<D>>& p;
  HWY_INLINE ParamVectors<D> At(std::int64_t i) const {
    const D d;
    return {hn::LoadU(d, p.scale + i), hn::LoadU(d, p.zero + i), hn::LoadU(d, p.lo + i),
            hn::LoadU(d, p.hi + i)};
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD
#endif
