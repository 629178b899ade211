// What the quantise family shares on the CPU: its arithmetic on vectors, and ForEachTile, which
// cuts a tensor of any granularity into tiles, so that an elementwise op is one small body.
// Per-target include guard, as in simd-inl.h.
#if defined(BITTERN_CPU_QUANTIZE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_CPU_QUANTIZE_INL_H_
#undef BITTERN_CPU_QUANTIZE_INL_H_
#else
#define BITTERN_CPU_QUANTIZE_INL_H_
#endif

#include <algorithm>
#include <cstring>
#include <tuple>
#include <utility>

#include "bittern/quantize_desc.h"
#include "core/numerics.h"
#include "cpu/simd-inl.h"
#include "cpu/stream-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {

template <class F>
inline constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(hn::ScalableTag<F>()));

// ---- arithmetic ----

// numerics.h quotient(): x / s, and 0 where that is NaN or s is 0.
template <class D>
HWY_INLINE hn::Vec<D> Quotient(D d, hn::Vec<D> x, hn::Vec<D> s) {
  const auto z = hn::Div(x, s);
  return hn::IfThenElseZero(hn::And(hn::Eq(z, z), hn::Ne(s, hn::Zero(d))), z);
}

// To the nearest integer, half to even. Highway's NearestInt also mends overflow, which no clamped
// value has.
template <class D>
HWY_INLINE hn::Vec<hn::RebindToSigned<D>> RoundToInt(D, hn::Vec<D> v) {
#if HWY_TARGET <= HWY_AVX3
  return hn::Vec<hn::RebindToSigned<D>>{_mm512_cvtps_epi32(v.raw)};
#else
  return hn::Vec<hn::RebindToSigned<D>>{_mm256_cvtps_epi32(v.raw)};
#endif
}

// The code, as i32 lanes, of an already clamped quotient: R(z) + zp.
template <class D>
HWY_INLINE auto CodeOf(D d, hn::Vec<D> z, hn::Vec<D> zero) {
  if constexpr (sizeof(hn::TFromD<D>) == 4) {
    return hn::Add(RoundToInt(d, z), RoundToInt(d, zero));
  } else {
    return hn::DemoteTo(hn::Rebind<std::int32_t, D>(), hn::Add(hn::Round(z), zero));
  }
}

// Bytes as f32 or f64 lanes.
template <class D, class Q>
HWY_INLINE hn::Vec<D> LoadCodes(D d, const Q* q) {
  const hn::Rebind<std::int32_t, D> di;
  const auto codes = hn::PromoteTo(di, hn::LoadU(hn::Rebind<Q, D>(), q));
  if constexpr (sizeof(hn::TFromD<D>) == 4) {
    return hn::ConvertTo(d, codes);
  } else {
    return hn::PromoteTo(d, codes);
  }
}

template <class DI, class Q>
HWY_INLINE void StoreCodes(DI, hn::Vec<DI> codes, Q* q) {
  const hn::Rebind<Q, DI> dq;
  hn::StoreU(hn::DemoteTo(dq, codes), dq, q);
}

template <class DI, class Q>
HWY_INLINE void StoreCodes(DI di, hn::Vec<DI> codes, Streamed<Q> q) {
  StoreCodes(di, codes, q.to);  // less than a line: not worth streaming
}

template <class D, class T>
HWY_INLINE void StoreVector(D d, hn::Vec<D> v, T* p) {
  hn::StoreU(v, d, reinterpret_cast<hn::TFromD<D>*>(p));
}
template <class D, class T>
HWY_INLINE void StoreVector(D d, hn::Vec<D> v, Streamed<T> p) {
  if constexpr (kStreams<D>) {
    hn::Stream(v, d, reinterpret_cast<hn::TFromD<D>*>(p.to));
  } else {
    StoreVector(d, v, p.to);
  }
}

// What an output pointer points to.
template <class To>
struct Target;
template <class T>
struct Target<T*> {
  using Type = T;
};
template <class T>
struct Target<Streamed<T>> {
  using Type = T;
};
template <class To>
using TargetOf = typename Target<To>::Type;

// Four vectors of i32 codes as one of bytes; `interleaved` as LoadTwo<bf16> has them.
template <bool kInterleaved, class To, class VI>
HWY_INLINE void StoreCodes4(VI a, VI b, VI c, VI d, To q) {
  using Q = TargetOf<To>;
  const hn::Repartition<std::uint8_t, hn::DFromV<VI>> d8;
  using V16 = decltype(hn::BitCast(hn::Repartition<std::int16_t, hn::DFromV<VI>>(), a));
  const auto narrow = [](VI first, VI second) HWY_ATTR -> V16 {
    const hn::Repartition<std::int16_t, hn::DFromV<VI>> d16;
    if constexpr (kInterleaved) {
      return hn::OddEven(hn::BitCast(d16, hn::ShiftLeft<16>(second)), hn::BitCast(d16, first));
    } else {
      return hn::ReorderDemote2To(d16, first, second);
    }
  };
  const auto ab = narrow(a, b).raw, cd = narrow(c, d).raw;
#if HWY_TARGET <= HWY_AVX3
  const __m512i mixed =
      std::is_signed_v<Q> ? _mm512_packs_epi16(ab, cd) : _mm512_packus_epi16(ab, cd);
  const __m512i order =
      kInterleaved ? _mm512_setr_epi32(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15)
                   : _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  StoreVector(d8, hn::Vec<decltype(d8)>{_mm512_permutexvar_epi32(order, mixed)}, q);
#else
  const __m256i mixed =
      std::is_signed_v<Q> ? _mm256_packs_epi16(ab, cd) : _mm256_packus_epi16(ab, cd);
  const __m256i order = kInterleaved ? _mm256_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7)
                                     : _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  StoreVector(d8, hn::Vec<decltype(d8)>{_mm256_permutevar8x32_epi32(mixed, order)}, q);
#endif
}

// ---- two vectors at once ----

// Two vectors of consecutive elements in whatever lane order is cheapest: bf16 splits into its even
// and its odd elements by a shift and a mask. StoreTwo puts them back.
template <class D>
struct Two {
  hn::Vec<D> a, b;
};
template <class D, class T>
HWY_INLINE Two<D> LoadTwo(D d, const T* p) {
  if constexpr (std::is_same_v<T, bf16>) {
    const hn::RebindToUnsigned<D> du;
    const auto both = hn::LoadU(du, reinterpret_cast<const std::uint32_t*>(p));
    return {hn::BitCast(d, hn::ShiftLeft<16>(both)),
            hn::BitCast(d, hn::And(both, hn::Set(du, 0xffff0000u)))};
  } else {
    return {LoadMath(d, p), LoadMath(d, p + hn::Lanes(d))};
  }
}

template <class D, class To>
HWY_INLINE void StoreTwo(D d, Two<D> v, To p) {
  if constexpr (std::is_same_v<TargetOf<To>, bf16>) {
    const hn::RebindToUnsigned<D> du;
    const hn::Repartition<std::uint16_t, D> d16;
    // As to_bf16, in the upper half of each lane.
    const auto round = [&](hn::Vec<D> x) HWY_ATTR {
      const auto u = hn::BitCast(du, x);
      const auto odd = hn::And(hn::ShiftRight<16>(u), hn::Set(du, 1u));
      const auto rounded = hn::Add(hn::Add(u, hn::Set(du, 0x7fffu)), odd);
      const auto quiet = hn::Or(u, hn::Set(du, 0x400000u));
      return hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(x)), quiet, rounded);
    };
    const auto even = hn::BitCast(d16, hn::ShiftRight<16>(round(v.a)));
    StoreVector(d16, hn::OddEven(hn::BitCast(d16, round(v.b)), even), p);
  } else {
    StoreMath(d, v.a, p);
    StoreMath(d, v.b, p + static_cast<std::int64_t>(hn::Lanes(d)));
  }
}

// ---- half x with half scales: R(x / s) without a division ----

// Two significands of at most 11 bits: x / s is a tie k + 1/2 exactly, or at least 2^-12 away from
// one. NearQuotient is exact where x / s is representable and within 2^-22 of it, relatively, so up
// to |z| = 512 it rounds as the quotient does, and beyond it is as far outside. Not so for scales
// near the ends of the exponent range (Inverse is then 0) nor for x that makes it NaN.
inline constexpr float kNearLimit = 512;

// 1 / s, or 0 where the quotient needs a division.
template <class D>
HWY_INLINE hn::Vec<D> Inverse(D d, hn::Vec<D> s, hn::Vec<D> lo, hn::Vec<D> hi) {
  const auto size = hn::Abs(s), limit = hn::Set(d, kNearLimit);
  const auto ordinary =
      hn::And(hn::Gt(size, hn::Set(d, 0x1p-100f)), hn::Lt(size, hn::Set(d, 0x1p100f)));
  const auto near = hn::And(hn::Ge(lo, hn::Neg(limit)), hn::Le(hi, limit));
  return hn::IfThenElseZero(hn::And(ordinary, near), hn::Div(hn::Set(d, 1.0f), s));
}

template <class V>
HWY_INLINE V NearQuotient(V x, V s, V inverse) {
  const auto z = hn::Mul(x, inverse);
  return hn::MulAdd(hn::NegMulAdd(z, s, x), inverse, z);
}

// Infinite and NaN x, and products that overflow.
template <class D>
HWY_INLINE bool AnyNaN(D d, hn::Vec<D> a, hn::Vec<D> b) {
  return !hn::AllFalse(d, hn::IsNaN(hn::Add(a, b)));
}

// ---- parameters ----

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

// q[0, n) = clamp(R(x / s) + zp, q_min, q_max), with parameters that are not far.
template <class Source, class To, class X>
HWY_INLINE void QuantizeRun(const Source& source, std::int64_t n, To q, const X* x) {
  using F = Math<X>;
  const hn::ScalableTag<F> d;
  constexpr std::int64_t kN = kLanes<F>;
  const auto codes = [&](std::int64_t i) HWY_ATTR {
    const auto& p = source.At(i);
    return CodeOf(d, hn::Clamp(Quotient(d, LoadMath(d, x + i), p.scale), p.lo, p.hi), p.zero);
  };
  std::int64_t i = 0;
  if constexpr (sizeof(F) == 4) {
    for (; i + 4 * kN <= n; i += 4 * kN) {
      PrefetchNext(x + i, 4 * kN);
      StoreCodes4<false>(codes(i), codes(i + kN), codes(i + 2 * kN), codes(i + 3 * kN), q + i);
    }
  }
  for (; i < n; i += kN) StoreCodes(hn::Rebind<std::int32_t, decltype(d)>(), codes(i), q + i);
}

// The same for half x and half scales, given Inverse's result, not 0.
template <class D, class To, class X>
HWY_INLINE void QuantizeHalfRun(const OneRun<D>& run, float inverse, std::int64_t n, To q,
                                const X* x) {
  constexpr std::int64_t kN = kLanes<float>;
  const D d;
  const auto& p = run.v;
  const auto r = hn::Set(d, inverse);
  std::int64_t i = 0;
  for (; i + 4 * kN <= n; i += 4 * kN) {
    PrefetchAhead(x + i, 4 * kN);
    const Two<D> x0 = LoadTwo(d, x + i), x1 = LoadTwo(d, x + i + 2 * kN);
    auto a = NearQuotient(x0.a, p.scale, r), b = NearQuotient(x0.b, p.scale, r);
    auto c = NearQuotient(x1.a, p.scale, r), e = NearQuotient(x1.b, p.scale, r);
    if (HWY_UNLIKELY(AnyNaN(d, hn::Add(a, b), hn::Add(c, e)))) {
      a = Quotient(d, x0.a, p.scale);
      b = Quotient(d, x0.b, p.scale);
      c = Quotient(d, x1.a, p.scale);
      e = Quotient(d, x1.b, p.scale);
    }
    const auto code = [&](hn::Vec<D> z)
                          HWY_ATTR { return CodeOf(d, hn::Clamp(z, p.lo, p.hi), p.zero); };
    StoreCodes4<std::is_same_v<X, bf16>>(code(a), code(b), code(c), code(e), q + i);
  }
  if (i < n) QuantizeRun(run, n - i, q + i, x + i);
}

// The body (see ForEachTile) of quantising with parameters that are there.
template <class X, class Q>
struct QuantizeBody {
  using F = Math<X>;
  using D = hn::ScalableTag<F>;
  static constexpr bool kWholeLines = sizeof(F) == 4;
  const QuantizeDesc& desc;
  alignas(64) F inverse[RunParams<F>::kSize];

  HWY_INLINE explicit QuantizeBody(const QuantizeDesc& d) : desc(d) {}

  void Prepare(const RunParams<F>& p, std::int64_t runs) {
    if constexpr (sizeof(X) == 2) SetInverses(p, runs, !desc.f32_scale, inverse);
  }

  template <class Source, class To>
  HWY_INLINE void operator()(const Source& source, std::int64_t n, To q, const X* x) const {
    if constexpr (sizeof(X) == 2 && std::is_same_v<Source, OneRun<D>>) {
      if (inverse[source.k] != 0) return QuantizeHalfRun(source, inverse[source.k], n, q, x);
    }
    QuantizeRun(source, n, q, x);
  }

  Q Exact(F s, std::int32_t zero, X x) const {
    return static_cast<Q>(quantize_code(quotient(to_math(x), s), zero, desc.q_min, desc.q_max));
  }
};

// ---- tiles ----

// GroupGeometry with rows joined where memory allows it: element j of row i uses parameter
// i * param_step + j / run % period.
struct TileGeometry {
  std::int64_t rows, row_length, run, param_step, period;

  TileGeometry(const GroupGeometry& g, bool dense)
      : rows(g.rows),
        row_length(g.row_length),
        run(g.run),
        param_step(g.param_step),
        period(g.row_length / g.run) {
    if (!dense) return;
    if (param_step != 0) {
      period *= rows;
    } else if (period == 1) {
      run *= rows;
    }
    row_length *= rows;
    rows = 1;
    param_step = 0;
  }
};

template <class T>
struct Rows {
  T* data;
  std::int64_t stride;
  template <class View>
  explicit Rows(const View& v)
      : data(v.template as<std::remove_const_t<T>>()), stride(v.row_stride()) {}
  T* at(std::int64_t row, std::int64_t j) const { return data + row * stride + j; }
};

// A body may read up to kOverrun elements beyond a tile, but not beyond what its thread owns.
template <class T>
struct Staging {
  alignas(64) T data[kTile + kOverrun];
};

template <class T>
HWY_INLINE const T* StageInput(const T* from, std::int64_t count, std::int64_t readable,
                               Staging<std::remove_const_t<T>>& staging) {
  if (count + kOverrun <= readable) return from;
  std::memcpy(staging.data, from, static_cast<std::size_t>(count) * sizeof(T));
  return staging.data;
}

// Elements between the start of p's cache line and p.
template <class T>
HWY_INLINE std::int64_t InLine(const T* p) {
  return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(p) % 64 / sizeof(T));
}

// Output elements [begin, end) of an elementwise op. A body has
//   kWholeLines                         with 64-byte vectors, it stores whole lines
//   Prepare(params, runs)               once per set of runs, when runs are long
//   operator()(source, n, out, in...)   n elements, reading and writing whole vectors
//   Exact(scale, zero_point, in...)     one element, for zero points too far for vectors
// Where runs are whole lines of a large output, they are streamed as they are computed. Any other
// tile is computed into a buffer in L1 and copied out: tails need no care, and the copy is made of
// whole streamed lines however runs and rows lie.
template <class F, class Body, class Out, class... In>
void ForEachTile(const GroupGeometry& geometry, const ParamTensors& t, std::int64_t begin,
                 std::int64_t end, Body& body, Rows<Out> out, Rows<const In>... in) {
  using D = hn::ScalableTag<F>;
  constexpr std::int64_t kN = kLanes<F>;
  constexpr auto kLine = static_cast<std::int64_t>(64 / sizeof(Out));
  const std::int64_t length = geometry.row_length;
  const TileGeometry g(geometry, out.stride == length && ((in.stride == length) && ...));
  // Runs that would waste most of a vector take parameters element by element.
  const bool short_runs = g.run < 2 * kN && g.run % kN != 0;
  const bool stream =
      g.rows * g.row_length * static_cast<std::int64_t>(sizeof(Out)) >= kStreamBytes;

  RunParams<F> runs, elements;
  std::int64_t loaded = -1, loaded_runs = 0;
  alignas(64) Out staged_out[kTile + 64 + kOverrun];
  std::tuple<Staging<In>...> staged_in;

  std::int64_t row = begin / g.row_length, j = begin % g.row_length;
  while (begin < end) {
    const std::int64_t first = j / g.run, skip = j % g.run;
    const std::int64_t left = std::min(g.row_length - j, end - begin);
    Out* to = out.at(row, j);
    // Whole lines of whole runs need no buffer, and so may be many.
    bool direct = Body::kWholeLines && kStreams<D> && stream && !short_runs && left >= kLine &&
                  InLine(to) == 0 && g.run % kLine == 0 && skip % kLine == 0;
    std::int64_t count = std::min(left, direct ? kDirectTile : short_runs ? kTileRuns : kTile);
    if (direct) {
      count -= count % kLine;
    } else {
      if (g.run <= kTile / kTileRuns) count = std::min(count, kTileRuns * g.run - skip);
      if (count < left) count -= InLine(to + count);
    }
    std::int64_t run_count = (skip + count - 1) / g.run + 1;

    const std::int64_t base = row * g.param_step, index = base + first % g.period;
    if (index != loaded || run_count != loaded_runs) {
      loaded = index;
      loaded_runs = run_count;
      runs.any_far = false;
      for (std::int64_t done = 0; done < run_count;) {
        const std::int64_t at = (first + done) % g.period;
        const std::int64_t n = std::min(run_count - done, g.period - at);
        LoadParams(t, base + at, n, done, runs);
        done += n;
      }
      SetBounds(t, run_count, runs);
      if (!short_runs) body.Prepare(runs, run_count);
    }
    if (direct && runs.any_far) {
      direct = false;
      count = std::min(count, kTile);
      run_count = (skip + count - 1) / g.run + 1;
    }

    Out* staged = staged_out + InLine(to);
    const std::tuple<const In*...> from = std::apply(
        [&](auto&... staging) {
          return std::tuple<const In*...>(
              StageInput(in.at(row, j), count, direct ? count + kOverrun : left, staging)...);
        },
        staged_in);
    std::int64_t emitted = 0;
    const auto emit = [&](std::int64_t until) HWY_ATTR {
      EmitLines(staged + emitted, static_cast<std::size_t>(until - emitted) * sizeof(Out),
                to + emitted, stream);
      emitted = until;
    };
    // Where run k lies in the tile.
    const auto run_begin = [&](std::int64_t k) {
      return std::max<std::int64_t>(k * g.run - skip, 0);
    };
    const auto run_end = [&](std::int64_t k) { return std::min((k + 1) * g.run - skip, count); };

    if (direct) {
      for (std::int64_t k = 0; k < run_count; ++k) {
        const OneRun<D> run(runs, k);
        const std::int64_t at = run_begin(k), n = run_end(k) - at;
        std::apply([&](const In*... x)
                       HWY_ATTR { body(run, n, Streamed<Out>{to + at}, (x + at)...); },
                   from);
      }
      emitted = count;
    } else if (short_runs) {
      const RunParams<F>* p = &runs;
      if (g.run > 1) {
        SpreadParams(runs, g.run, skip, count, elements);
        p = &elements;
      }
      std::apply([&](const In*... x) HWY_ATTR { body(PerElement<D>{*p}, count, staged, x...); },
                 from);
    } else {
      for (std::int64_t k = 0; k < run_count; ++k) {
        const OneRun<D> run(runs, k);
        const std::int64_t stop = run_end(k);
        for (std::int64_t at = run_begin(k), n = 0; at < stop; at += n) {
          n = std::min(stop - at, kPiece);
          std::apply([&](const In*... x) HWY_ATTR { body(run, n, staged + at, (x + at)...); },
                     from);
          if (!stream || runs.any_far) continue;
          // Whole lines leave at once, so that reads and writes of memory take turns.
          const std::int64_t ready = at + n - InLine(to + at + n);
          if (ready > emitted) emit(ready);
        }
      }
    }
    if (runs.any_far) {
      for (std::int64_t k = 0; k < run_count; ++k) {
        const std::int32_t zero = t.zero(base + (first + k) % g.period);
        if (!IsFar<F>(t, zero)) continue;
        for (std::int64_t i = run_begin(k); i < run_end(k); ++i)
          staged[i] = std::apply(
              [&](const In*... x) { return body.Exact(runs.scale[k], zero, x[i]...); }, from);
      }
    }
    emit(count);

    begin += count;
    j += count;
    if (j == g.row_length) {
      j = 0;
      ++row;
    }
  }
  if (stream) hwy::FlushStream();
}

}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif
#endif
