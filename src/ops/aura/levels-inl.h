// Values to the codes of a sorted table, and codes to the table's levels.
//
//   const LevelSearch<kBits> search(boundaries);   2^kBits - 1 of them, never descending
//   search(r)                                      how many lie strictly below r; 0 for NaN
//   const LevelTable<kBits> levels(codebook);      2^kBits
//   levels(code)                                   codebook[code]
#if defined(BITTERN_CPU_LEVELS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_CPU_LEVELS_INL_H_
#undef BITTERN_CPU_LEVELS_INL_H_
#else
#define BITTERN_CPU_LEVELS_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "ops/aura/rotate-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {

using DU32 = hn::RebindToUnsigned<DF32>;
using VU32 = hn::Vec<DU32>;

// table[index], 2^kBits entries, at least a vector of them and aligned; bits of `index` beyond
// kBits are not read. AVX-512 permutes two vectors at a time and chooses among pairs by the upper
// bits; AVX2 chooses among two, and reads longer tables from memory.
template <int kBits>
HWY_INLINE VF32 LookUp(const float* table, VU32 index) {
  const DF32 d;
#if HWY_TARGET <= HWY_AVX3
  if constexpr (kBits <= 4) {
    return VF32{_mm512_permutexvar_ps(index.raw, _mm512_load_ps(table))};
  } else if constexpr (kBits == 5) {
    return VF32{
        _mm512_permutex2var_ps(_mm512_load_ps(table), index.raw, _mm512_load_ps(table + 16))};
  } else {
    const VF32 low = LookUp<kBits - 1>(table, index);
    const VF32 high = LookUp<kBits - 1>(table + (1 << (kBits - 1)), index);
    const __mmask16 upper = _mm512_test_epi32_mask(index.raw, _mm512_set1_epi32(1 << (kBits - 1)));
    return VF32{_mm512_mask_mov_ps(low.raw, upper, high.raw)};
  }
#else
  const hn::RebindToSigned<DF32> di;
  if constexpr (kBits <= 3) {
    return hn::TableLookupLanes(hn::Load(d, table), hn::IndicesFromVec(d, index));
  } else if constexpr (kBits == 4) {
    const auto upper = hn::MaskFromVec(hn::BitCast(d, hn::ShiftLeft<28>(index)));
    return hn::IfThenElse(upper, LookUp<3>(table + 8, index), LookUp<3>(table, index));
  } else {
    return hn::GatherIndex(d, table, hn::BitCast(di, index));
  }
#endif
}

template <int kBits>
class LevelTable {
 public:
  explicit LevelTable(const float* levels) {
    for (std::int64_t i = 0; i < kPadded; ++i) levels_[i] = levels[i % (1 << kBits)];
  }
  HWY_INLINE VF32 operator()(VU32 code) const { return LookUp<kBits>(levels_, code); }

 private:
  static constexpr std::int64_t kPadded = std::max<std::int64_t>(1 << kBits, kF32Lanes);
  HWY_ALIGN float levels_[kPadded];
};

// Bisection: step k compares with one of 2^k boundaries, which step k's table holds.
template <int kBits>
class Bisection {
 public:
  explicit Bisection(const float* boundaries) {
    for (int k = 0; k < kBits; ++k) {
      float* table = tables_ + At(k);
      for (std::int64_t i = 0; i < std::max<std::int64_t>(1 << k, kF32Lanes); ++i)
        table[i] = boundaries[((2 * (i % (1 << k)) + 1) << (kBits - 1 - k)) - 1];
    }
  }
  HWY_INLINE VU32 operator()(VF32 r) const { return Step<0>(r, hn::Zero(DU32())); }

 private:
  // Tables shorter than a vector take a whole one.
  static constexpr std::int64_t At(int k) {
    std::int64_t at = 0;
    for (int i = 0; i < k; ++i) at += std::max<std::int64_t>(1 << i, kF32Lanes);
    return at;
  }
  template <int kStep>
  HWY_INLINE VU32 Step(VF32 r, VU32 code) const {
    if constexpr (kStep == kBits) {
      return code;
    } else {
      const DU32 du;
      const VF32 boundary =
          kStep == 0 ? hn::Load(DF32(), tables_) : LookUp<kStep>(tables_ + At(kStep), code);
      const VU32 twice = hn::Add(code, code);
      const auto above = hn::RebindMask(du, hn::Gt(r, boundary));
      return Step<kStep + 1>(r, hn::IfThenElse(above, hn::Add(twice, hn::Set(du, 1u)), twice));
    }
  }
  HWY_ALIGN float tables_[At(kBits)];
};

// Cells: the line is cut into 32 intervals of one width. If no two boundaries share one, the code
// is the number of boundaries in the cells below and one comparison. Which cell a value falls into
// never descends as the value grows, whatever the rounding, so this is exact.
#if HWY_TARGET <= HWY_AVX3
class Cells {
 public:
  // Whether the boundaries allow it.
  bool Make(const float* boundaries, std::int64_t count) {
    const float first = boundaries[0], last = boundaries[count - 1];
    slope_ = (kCells - 2) / (last - first);
    offset_ = kMagic + 1 - first * slope_;
    if (!std::isfinite(slope_) || !std::isfinite(offset_)) return false;
    std::int64_t below = 0;
    for (std::int64_t cell = 0; cell < kCells; ++cell) {
      const std::int64_t at = below;
      while (below < count && CellOf(boundaries[below]) == cell) ++below;
      if (below > at + 1) return false;
      base_[cell] = static_cast<std::uint32_t>(at);
      boundary_[cell] = below > at ? boundaries[at] : std::numeric_limits<float>::infinity();
    }
    return below == count;
  }
  HWY_INLINE VU32 operator()(VF32 r) const {
    const DF32 d;
    const __m512i cell = _mm512_castps_si512(CellAt(d, r).raw);
    const __m512i base =
        _mm512_permutex2var_epi32(_mm512_load_si512(base_), cell, _mm512_load_si512(base_ + 16));
    const __m512 boundary =
        _mm512_permutex2var_ps(_mm512_load_ps(boundary_), cell, _mm512_load_ps(boundary_ + 16));
    const __mmask16 above = _mm512_cmp_ps_mask(r.raw, boundary, _CMP_GT_OQ);
    return VU32{_mm512_mask_add_epi32(base, above, base, _mm512_set1_epi32(1))};
  }

 private:
  static constexpr std::int64_t kCells = 32;
  static constexpr float kMagic = 0x1p23f;  // its last bit counts ones

  // kMagic + the cell; the first for NaN.
  template <class D>
  HWY_INLINE hn::Vec<D> CellAt(D d, hn::Vec<D> r) const {
    const auto t = hn::MulAdd(r, hn::Set(d, slope_), hn::Set(d, offset_));
    return hn::Min(hn::Max(t, hn::Set(d, kMagic)), hn::Set(d, kMagic + (kCells - 1)));
  }
  std::int64_t CellOf(float r) const {
    const hn::CappedTag<float, 1> d;
    return static_cast<std::int64_t>(hn::GetLane(CellAt(d, hn::Set(d, r))) - kMagic);
  }

  float slope_, offset_;
  HWY_ALIGN std::uint32_t base_[kCells];
  HWY_ALIGN float boundary_[kCells];
};
#endif

}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif
#endif
