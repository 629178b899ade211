// Passing over consecutive rows of the cache in f32: the products of queries with rows of K, and
// the sums of weighted rows of V.
#if defined(BITTERN_OPS_AURA_ATTENTION_PASSES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_OPS_AURA_ATTENTION_PASSES_INL_H_
#undef BITTERN_OPS_AURA_ATTENTION_PASSES_INL_H_
#else
#define BITTERN_OPS_AURA_ATTENTION_PASSES_INL_H_
#endif

#include "cpu/reduce-inl.h"
#include "ops/aura/aura_attention/rows-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

// Consecutive rows in memory.
struct Rows {
  const std::byte* at;
  std::int64_t stride;  // bytes
  std::int64_t count;
};

// The rows as f32, one after another.
template <class Source>
HWY_NOINLINE void Convert(const Source& source_, const Rows& rows, std::int64_t units,
                          float* HWY_RESTRICT to) {
  const DF d;
  const Source source = source_;
  for (std::int64_t n = 0; n < rows.count; ++n, to += units * kUnit) {
    const auto convert = [&]<int kUnits>(Type<std::integral_constant<int, kUnits>>,
                                         std::int64_t unit) HWY_ATTR {
      for (std::int64_t half = 0; half < kHalves; ++half) {
        VF y[kUnits];
        source.template Units<kUnits>(rows.at + n * rows.stride, unit, half, y);
        for (int i = 0; i < kUnits; ++i)
          hn::Store(y[i], d, to + (unit + i) * kUnit + half * kWidth);
      }
    };
    std::int64_t unit = 0;
    for (; unit + 4 <= units; unit += 4) convert(Type<std::integral_constant<int, 4>>(), unit);
    for (; unit < units; ++unit) convert(Type<std::integral_constant<int, 1>>(), unit);
  }
}

// The halving tree inside each of 16 sets of accumulators; to[n] gets the n-th.
HWY_INLINE void FoldAccumulators(const float (*HWY_RESTRICT acc)[kUnit], float* HWY_RESTRICT to) {
  const DF d;
  for (std::int64_t n = 0; n < kUnit; n += kWidth) {
    VF v[kWidth];
    for (std::int64_t i = 0; i < kWidth; ++i) {
      v[i] = hn::Load(d, acc[n + i]);
      if constexpr (kHalves == 2) v[i] = hn::Add(v[i], hn::Load(d, acc[n + i] + kWidth));
    }
    hn::StoreU(LaneTrees(d, v), d, to + n);
  }
}

// acc[r][n] += the products of some units of row n and of q[r]; from 0 for the first unit.
template <int kUnits, int kRows, class Source>
HWY_INLINE void DotUnits(const Source& source_, const Rows& k, std::int64_t unit,
                         const float* const* q, float (*HWY_RESTRICT acc)[kUnit][kUnit]) {
  const DF d;
  const Source source = source_;
  for (std::int64_t half = 0; half < kHalves; ++half) {
    const std::int64_t from = unit * kUnit + half * kWidth;
    // A single row's query stays in registers.
    VF held[kUnits];
    for (int i = 0; i < kUnits; ++i) held[i] = hn::LoadU(d, q[0] + from + i * kUnit);
    for (std::int64_t n = 0; n < k.count; ++n) {
      VF y[kUnits];
      source.template Units<kUnits>(k.at + n * k.stride, unit, half, y);
      for (int r = 0; r < kRows; ++r) {
        float* to = acc[r][n] + half * kWidth;
        VF sum = unit == 0 ? hn::Zero(d) : hn::Load(d, to);
        for (int i = 0; i < kUnits; ++i) {
          const VF a = r == 0 ? held[i] : hn::LoadU(d, q[r] + from + i * kUnit);
          sum = hn::MulAdd(a, y[i], sum);
        }
        hn::Store(sum, d, to);
      }
    }
  }
}

template <int kRows, class Source>
HWY_NOINLINE void DotRows(const Source& source, const Rows& k, std::int64_t units,
                          const float* const* q, float (*acc)[kUnit][kUnit]) {
  std::int64_t unit = 0;
  for (; unit + 8 <= units; unit += 8) DotUnits<8, kRows>(source, k, unit, q, acc);
  for (; unit + 4 <= units; unit += 4) DotUnits<4, kRows>(source, k, unit, q, acc);
  for (; unit < units; ++unit) DotUnits<1, kRows>(source, k, unit, q, acc);
}

// dots[r][at + n] = q[r] . row n
template <class Source>
void Dots(const Source& source, const Rows& k, std::int64_t units, const float* const* q,
          std::int64_t rows, float (*dots)[kSplit], std::int64_t at) {
  HWY_ALIGN float acc[4][kUnit][kUnit];
  for (std::int64_t n = 0; n < k.count; n += kUnit) {
    const Rows some{k.at + n * k.stride, k.stride, std::min(kUnit, k.count - n)};
    for (std::int64_t r = 0, done; r < rows; r += done) {
      done = std::min<std::int64_t>(rows - r, 4);
      if (done == 4) {
        DotRows<4>(source, some, units, q + r, acc);
      } else if (done == 3) {
        DotRows<3>(source, some, units, q + r, acc);
      } else if (done == 2) {
        DotRows<2>(source, some, units, q + r, acc);
      } else {
        DotRows<1>(source, some, units, q + r, acc);
      }
      for (std::int64_t i = 0; i < done; ++i) {
        for (std::int64_t t = some.count; t < kUnit; ++t) std::fill_n(acc[i][t], kUnit, 0.0f);
        HWY_ALIGN float sums[kUnit];
        FoldAccumulators(acc[i], sums);
        std::copy_n(sums, some.count, dots[r + i] + at + n);
      }
    }
  }
}

// o[r] += w[r][at + n] * row n, n ascending, for kUnits units and kRows of the rows.
template <int kUnits, int kRows, class Source>
HWY_INLINE void AddUnits(const Source& source_, const Rows& v, std::int64_t unit,
                         const float (*HWY_RESTRICT w)[kSplit], std::int64_t at,
                         float* const* HWY_RESTRICT o) {
  const DF d;
  const Source source = source_;
  for (std::int64_t half = 0; half < kHalves; ++half) {
    const std::int64_t from = unit * kUnit + half * kWidth;
    VF sum[kRows][kUnits];
    for (int r = 0; r < kRows; ++r)
      for (int i = 0; i < kUnits; ++i) sum[r][i] = hn::LoadU(d, o[r] + from + i * kUnit);
    for (std::int64_t n = 0; n < v.count; ++n) {
      VF y[kUnits];
      source.template Units<kUnits>(v.at + n * v.stride, unit, half, y);
      for (int r = 0; r < kRows; ++r) {
        const VF weight = hn::Set(d, w[r][at + n]);
        for (int i = 0; i < kUnits; ++i) sum[r][i] = hn::MulAdd(weight, y[i], sum[r][i]);
      }
    }
    for (int r = 0; r < kRows; ++r)
      for (int i = 0; i < kUnits; ++i) hn::StoreU(sum[r][i], d, o[r] + from + i * kUnit);
  }
}

template <int kRows, class Source>
HWY_NOINLINE void AddRows(const Source& source, const Rows& v, std::int64_t units,
                          const float (*w)[kSplit], std::int64_t at, float* const* o) {
  // As many sums as hide the latency of fma and fit the registers.
  constexpr int kMost = kRows == 1 ? 8 : kRows == 2 || HWY_TARGET <= HWY_AVX3 ? 4 : 2;
  std::int64_t unit = 0;
  for (; unit + kMost <= units; unit += kMost) AddUnits<kMost, kRows>(source, v, unit, w, at, o);
  for (; unit < units; ++unit) AddUnits<1, kRows>(source, v, unit, w, at, o);
}

template <class Source>
void Add(const Source& source, const Rows& v, std::int64_t units, const float (*w)[kSplit],
         std::int64_t at, float* const* o, std::int64_t rows) {
  std::int64_t r = 0;
  for (; r + 4 <= rows; r += 4) AddRows<4>(source, v, units, w + r, at, o + r);
  for (; r + 3 <= rows; r += 3) AddRows<3>(source, v, units, w + r, at, o + r);
  for (; r + 2 <= rows; r += 2) AddRows<2>(source, v, units, w + r, at, o + r);
  for (; r < rows; ++r) AddRows<1>(source, v, units, w + r, at, o + r);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD
#endif
