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

#include <cstdint>

#include "cpu/rotate-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {

using DU32 = hn::RebindToUnsigned<DF32>;
using VU32 = hn::Vec<DU32>;

// Tables of up to two vectors are looked up in registers, longer ones in memory.
inline constexpr int kLaneBits = kF32Lanes == 16 ? 4 : 3;

HWY_INLINE VF32 LookUp(VF32 table, VU32 index) {
  const DF32 d;
  return hn::TableLookupLanes(table, hn::IndicesFromVec(d, index));
}

template <int kBits>
class LevelTable {
 public:
  explicit LevelTable(const float* levels) : levels_(levels) {
    const DF32 d;
    HWY_ALIGN float padded[2 * kF32Lanes];
    for (std::int64_t i = 0; i < 2 * kF32Lanes; ++i) padded[i] = levels[i % kCount];
    low_ = hn::Load(d, padded);
    high_ = hn::Load(d, padded + kF32Lanes);
  }
  HWY_INLINE VF32 operator()(VU32 code) const {
    [[maybe_unused]] const DF32 d;
    if constexpr (kBits <= kLaneBits) {
      return LookUp(low_, code);
    } else if constexpr (kBits == kLaneBits + 1) {
#if HWY_TARGET <= HWY_AVX3
      return VF32{_mm512_permutex2var_ps(low_.raw, code.raw, high_.raw)};
#else
      // The permutation reads the low bits alone; bit 3 chooses.
      const auto upper = hn::MaskFromVec(hn::BitCast(d, hn::ShiftLeft<31 - kLaneBits>(code)));
      return hn::IfThenElse(upper, LookUp(high_, code), LookUp(low_, code));
#endif
    } else {
      return hn::GatherIndex(d, levels_, hn::BitCast(hn::RebindToSigned<DF32>(), code));
    }
  }

 private:
  static constexpr int kCount = 1 << kBits;
  const float* levels_;
  VF32 low_, high_;
};

// Bisection: level k of the search compares with one of 2^k boundaries.
template <int kBits>
class LevelSearch {
 public:
  explicit LevelSearch(const float* boundaries) : boundaries_(boundaries) {
    const DF32 d;
    HWY_ALIGN float table[kF32Lanes];
    for (int k = 0; k < kInRegisters; ++k) {
      for (std::int64_t i = 0; i < kF32Lanes; ++i)
        table[i] = boundaries[((2 * (i % (1 << k)) + 1) << (kBits - 1 - k)) - 1];
      table_[k] = hn::Load(d, table);
    }
  }
  HWY_INLINE VU32 operator()(VF32 r) const {
    const DU32 du;
    const VU32 one = hn::Set(du, 1u);
    VU32 code = hn::IfThenElseZero(hn::RebindMask(du, hn::Gt(r, table_[0])), one);
    for (int k = 1; k < kBits; ++k) {
      const auto above = hn::RebindMask(du, hn::Gt(r, Boundary(k, code)));
      const VU32 twice = hn::Add(code, code);
      code = hn::IfThenElse(above, hn::Add(twice, one), twice);
    }
    return code;
  }

 private:
  static constexpr int kInRegisters = kBits <= kLaneBits + 1 ? kBits : kLaneBits + 1;

  HWY_INLINE VF32 Boundary(int k, VU32 code) const {
    if (k < kInRegisters) return LookUp(table_[k], code);
    const DF32 d;
    const DU32 du;
    // (2 code + 1) 2^(kBits - 1 - k) - 1
    const VU32 index =
        hn::Sub(hn::ShiftLeftSame(hn::Add(hn::Add(code, code), hn::Set(du, 1u)), kBits - 1 - k),
                hn::Set(du, 1u));
    return hn::GatherIndex(d, boundaries_, hn::BitCast(hn::RebindToSigned<DF32>(), index));
  }

  const float* boundaries_;
  VF32 table_[kInRegisters];
};

}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif
#endif
