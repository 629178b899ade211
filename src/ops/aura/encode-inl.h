// Rows to codes and scales, the steps of bittern/ops/aura_encode.h.
#if defined(BITTERN_CPU_ENCODE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_CPU_ENCODE_INL_H_
#undef BITTERN_CPU_ENCODE_INL_H_
#else
#define BITTERN_CPU_ENCODE_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "bittern/aura_desc.h"
#include "core/numerics.h"
#include "cpu/pack-inl.h"
#include "cpu/reduce-inl.h"
#include "hwy/cache_control.h"
#include "ops/aura/levels-inl.h"
#include "ops/aura/rotate-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {

struct RowsToEncode {
  ConstView x;
  const float *table, *boundaries, *codebook;
  MutView packed, scales;
};

// kF32Lanes rows at a time; lane i of a vector of sums or norms belongs to row i.
class RowEncoder {
 public:
  RowEncoder(const AuraDesc& d, const RowsToEncode& rows)
      : d_(d),
        a_(rows),
        stride_(RoundUpToLanes(d.dim)),
        element_bytes_(static_cast<std::int64_t>(size_of(d.element))),
        rotation_(d.rotation, d.dim, rows.table),
        packer_(d.bits) {}

  void Encode(std::int64_t begin, std::int64_t end) {
    switch (d_.bits) {
      case 1: return EncodeAt<1>(begin, end);
      case 2: return EncodeAt<2>(begin, end);
      case 3: return EncodeAt<3>(begin, end);
      case 4: return EncodeAt<4>(begin, end);
      case 5: return EncodeAt<5>(begin, end);
      case 6: return EncodeAt<6>(begin, end);
      case 7: return EncodeAt<7>(begin, end);
      default: return EncodeAt<8>(begin, end);
    }
  }

 private:
  template <int kBits>
  void EncodeAt(std::int64_t begin, std::int64_t end) {
    const float* boundaries = a_.boundaries;
#if HWY_TARGET <= HWY_AVX3
    if constexpr (kBits <= 4) {
      if (Cells cells; cells.Make(boundaries, d_.levels() - 1)) {
        return EncodeBy<kBits>(cells, begin, end);
      }
    }
#endif
    EncodeBy<kBits>(Bisection<kBits>(boundaries), begin, end);
  }

  template <int kBits, class Search>
  HWY_NOINLINE void EncodeBy(const Search& search, std::int64_t begin, std::int64_t end) {
    const LevelTable<kBits> codebook(a_.codebook);
    for (std::int64_t first = begin; first < end; first += kF32Lanes) {
      const std::int64_t count = std::min(end - first, kF32Lanes);
      (void)visit<float, f16, bf16>(d_.element, [&]<class X>(Type<X>) {
        Rotate(a_.x.as<X>() + first * a_.x.row_stride(), count);
        return Status();
      });
      Quantise(search, codebook, first, count);
    }
  }

  // Steps 1 and 2: the tile becomes r. Rows of whole vectors come straight from x.
  template <class X>
  HWY_NOINLINE void Rotate(const X* HWY_RESTRICT x, std::int64_t count) {
    const DF32 d;
    const std::int64_t n = d_.dim, x_stride = a_.x.row_stride();
    const bool direct = n == stride_;
    VF32 sums[kF32Lanes];
    for (std::int64_t i = 0; i < kF32Lanes; ++i) {
      if (i >= count) {
        sums[i] = hn::Zero(d);
      } else if (direct) {
        sums[i] = SquaresOf(x + i * x_stride);
      } else {
        LoadRow(x + i * x_stride, n, tile_ + i * stride_);
        sums[i] = SquaresOf(static_cast<const float*>(tile_ + i * stride_));
      }
    }
    const VF32 total = LaneTrees(d, sums);
    const VF32 norm = hn::Sqrt(total);
    hn::Store(norm, d, norm_);
    const auto has_direction = hn::Gt(norm, hn::Zero(d));
    hn::Store(hn::IfThenElseZero(has_direction, hn::Div(hn::Set(d, 1.0f), norm)), d, inv_);
    std::uint32_t staged = direct ? 0 : ~0u;  // rows that are in the tile
    poisoned_ = 0;
    const auto ordinary =
        hn::And(hn::Ge(total, hn::Set(d, kAuraLeastSquares)), hn::Lt(total, hn::Inf(d)));
    if (!hn::AllTrue(d, ordinary)) {
      HWY_ALIGN float squares[kF32Lanes];
      hn::Store(total, d, squares);
      for (std::int64_t i = 0; i < count; ++i) {
        if (squares[i] >= kAuraLeastSquares && squares[i] <= max_finite<float>()) continue;
        StageExtreme(x + i * x_stride, i);
        staged |= 1u << i;
      }
    }
    const auto element = [&](std::int64_t i, std::int64_t j) HWY_ATTR {
      const bool in_tile = (staged >> i & 1) != 0;
      return in_tile ? hn::Load(d, tile_ + i * stride_ + j) : LoadMath(d, x + i * x_stride + j);
    };
    const auto unit = [&](std::int64_t i, std::int64_t j)
                          HWY_ATTR { return hn::Mul(element(i, j), hn::Set(d, inv_[i])); };
    if (d_.rotation == Rotation::identity) {
      for (std::int64_t i = 0; i < count; ++i)
        for (std::int64_t j = 0; j < n; j += kF32Lanes)
          hn::Store(unit(i, j), d, tile_ + i * stride_ + j);
    } else if (d_.rotation == Rotation::dense) {
      rotation_.ApplyFrom(unit, tile_, stride_, count, false);
    } else if (!rotation_.InRegisters()) {
      rotation_.ApplyFrom(element, tile_, stride_, count, false, inv_);
    } else {
      for (std::int64_t i = 0; i < count; ++i) {
        float* row = tile_ + i * stride_;
        if ((staged >> i & 1) != 0) {
          rotation_.Hadamard(
              inv_[i], [&](std::int64_t j) HWY_ATTR { return hn::Load(d, row + j); }, row);
        } else {
          rotation_.Hadamard(
              inv_[i], [&](std::int64_t j) HWY_ATTR { return LoadMath(d, x + i * x_stride + j); },
              row);
        }
      }
    }
  }

  // dot() of a row but for LaneTrees. The chains are kChains vectors: step(j, chain) feeds elements
  // j .. j + kF32Lanes - 1, zeros past the end of the row, to theirs.
  template <class Step>
  HWY_INLINE VF32 Dot(const Step& step) const {
    constexpr std::int64_t kChains = 32 / kF32Lanes;
    VF32 chain[kChains];
    for (VF32& c : chain) c = hn::Zero(DF32());
    for (std::int64_t j = 0; j < stride_; j += 32) {
      for (std::int64_t i = 0; i < kChains; ++i) {
        const std::int64_t at = j + i * kF32Lanes;
        if (i == 0 || at < stride_) chain[i] = step(at, chain[i]);
      }
    }
    for (std::int64_t half = kChains / 2; half > 0; half /= 2)
      for (std::int64_t i = 0; i < half; ++i) chain[i] = hn::Add(chain[i], chain[i + half]);
    return chain[0];
  }
  template <class X>
  HWY_INLINE VF32 SquaresOf(const X* x) const {
    return Dot([&](std::int64_t j, VF32 chain) HWY_ATTR {
      const VF32 v = LoadMath(DF32(), x + j);
      return hn::MulAdd(v, v, chain);
    });
  }

  // sum() of a row but for LaneTrees, of the terms that leaf(j) gives from j on, zeros past the end
  // of the row. The tree's own zeros are not added where no sum can be -0.
  template <class Leaf>
  HWY_INLINE VF32 SumOfEights(const Leaf& leaf) {
    const DF32 d;
    constexpr std::int64_t kGroup = 8 * kF32Lanes;
    if (stride_ == kGroup) return Eights(leaf, 0);
    if (stride_ == kGroup / 2) {
      return Eights([&](std::int64_t j) HWY_ATTR { return j < kGroup / 2 ? leaf(j) : hn::Zero(d); },
                    0);
    }
    for (std::int64_t j = 0; j < stride_; j += kF32Lanes) hn::Store(leaf(j), d, squares_ + j);
    const auto stored = [&](std::int64_t j) HWY_ATTR { return hn::Load(d, squares_ + j); };
    VF32 sums[kAuraMaxDim / kGroup];
    std::int64_t n = (stride_ + kGroup - 1) / kGroup;
    for (std::int64_t i = 0; i < n; ++i) sums[i] = Eights(stored, i * kGroup);
    while (n > 1) {
      const auto half = static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(n))) / 2;
      for (std::int64_t i = 0; i + half < n; ++i) sums[i] = hn::Add(sums[i], sums[i + half]);
      n = half;
    }
    return sums[0];
  }
  // Lane i is the sum of eight neighbours, terms j + 8 i and on.
  template <class Leaf>
  static HWY_INLINE VF32 Eights(const Leaf& leaf, std::int64_t j) {
    const VF32 sums = Neighbours<4>(leaf, j);
    if constexpr (kF32Lanes == 8) {
      return sums;
    } else {  // lane 8 h + v has those of half h of vector v
      const DF32 d;
      alignas(64) static constexpr std::int32_t kFrom[] = {0, 8,  1, 9,  2, 10, 3, 11,
                                                           4, 12, 5, 13, 6, 14, 7, 15};
      return hn::TableLookupLanes(sums, hn::SetTableIndices(d, kFrom));
    }
  }
  // Sums of 2 kApart neighbours of 2 kApart vectors, by vector in the lanes that differ within
  // 2 kApart. Of two vectors, a's sums take the lanes without kApart, b's those with it.
  template <int kApart, class Leaf>
  static HWY_INLINE VF32 Neighbours(const Leaf& leaf, std::int64_t j) {
    if constexpr (kApart == 0) {
      return leaf(j);
    } else {
      const VF32 a = Neighbours<kApart / 2>(leaf, j);
      const VF32 b = Neighbours<kApart / 2>(leaf, j + kApart * kF32Lanes);
      if constexpr (kApart == 1) {
        return hn::Add(hn::OddEven(b, a), hn::Shuffle2301(hn::OddEven(a, b)));
      } else if constexpr (kApart == 2) {
        const DF32 d;
        const hn::RepartitionToWide<DF32> dw;
        const auto wa = hn::BitCast(dw, a), wb = hn::BitCast(dw, b);
        return hn::Add(hn::BitCast(d, hn::OddEven(wb, wa)),
                       hn::Shuffle1032(hn::BitCast(d, hn::OddEven(wa, wb))));
      } else {
        return hn::Add(hn::OddEvenBlocks(b, a), hn::SwapAdjacentBlocks(hn::OddEvenBlocks(a, b)));
      }
    }
  }

  // A row whose squares are not ordinary, or that is not finite: the latter as zeros.
  template <class X>
  HWY_NOINLINE void StageExtreme(const X* x, std::int64_t i) {
    const DF32 d;
    float* row = tile_ + i * stride_;
    LoadRow(x, d_.dim, row);
    const hn::RebindToUnsigned<DF32> du;
    auto largest = hn::Zero(du);
    for (std::int64_t j = 0; j < stride_; j += kF32Lanes)
      largest = hn::Max(largest, hn::BitCast(du, hn::Abs(hn::Load(d, row + j))));
    const std::uint32_t most = hn::GetLane(hn::MaxOfLanes(du, largest));
    if (most >= kAuraNotFinite) {
      std::fill_n(row, stride_, 0.0f);
      poisoned_ |= 1u << i;
    }
    const AuraRange range = aura_range(most);
    for (std::int64_t j = 0; j < stride_; j += kF32Lanes)
      hn::Store(hn::Mul(hn::Load(d, row + j), hn::Set(d, range.down)), d, row + j);
    const float norm = std::sqrt(LaneTree(d, SquaresOf(row), kF32Lanes));
    inv_[i] = norm > 0 ? 1 / norm : 0;
    norm_[i] = std::min(norm * range.up, max_finite<float>());
  }

  // Asks for a row of x, or for what would be one past the last: a little at a time, since memory
  // brings the next rows while these are worked on, but not all of them at once.
  HWY_INLINE void Prefetch(std::int64_t row) const {
    const auto at = reinterpret_cast<std::uintptr_t>(a_.x.data) +
                    static_cast<std::uintptr_t>(row * a_.x.row_stride() * element_bytes_);
    for (std::int64_t j = 0; j < d_.dim * element_bytes_; j += 64)
      hwy::Prefetch(reinterpret_cast<const char*>(at + static_cast<std::uintptr_t>(j)));
  }

  // Steps 3 to 5.
  template <class Search, class Codebook>
  HWY_INLINE void Quantise(const Search& search, const Codebook& codebook, std::int64_t first,
                           std::int64_t count) {
    const DF32 d;
    const bool products =
        d_.scale_rule == ScaleRule::least_squares || d_.scale_rule == ScaleRule::unbiased;
    const std::size_t bytes = packer_.Bytes(static_cast<std::size_t>(d_.dim));
    const auto row_bytes = static_cast<std::size_t>(4 * packed_words(d_.dim, d_.bits));
    const auto tail = hn::FirstN(d, static_cast<std::size_t>(d_.dim % kF32Lanes));
    VF32 cc[kF32Lanes], rc[kF32Lanes];
    for (std::int64_t i = 0; i < kF32Lanes; ++i) {
      cc[i] = rc[i] = hn::Zero(d);
      if (i >= count) continue;
      Prefetch(first + kF32Lanes + i);
      const float* row = tile_ + i * stride_;
      cc[i] = SumOfEights([&](std::int64_t j) HWY_ATTR {
        const VF32 r = hn::Load(d, row + j);
        const VU32 code = search(r);
        StoreCodes(code, codes_ + j);
        VF32 c = codebook(code);
        if (j + kF32Lanes > d_.dim) c = hn::IfThenElseZero(tail, c);
        if (products) hn::Store(c, d, levels_ + j);
        return hn::Mul(c, c);
      });
      if (products) {
        rc[i] = Dot([&](std::int64_t j, VF32 chain) HWY_ATTR {
          return hn::MulAdd(hn::Load(d, row + j), hn::Load(d, levels_ + j), chain);
        });
      }
      auto* packed = reinterpret_cast<std::uint8_t*>(a_.packed.as<std::uint32_t>() +
                                                     (first + i) * a_.packed.row_stride());
      if ((poisoned_ >> i & 1) != 0) {
        std::memset(packed, 0, row_bytes);
        continue;
      }
      packer_.Pack(codes_, static_cast<std::size_t>(d_.dim), packed);
      std::memset(packed + bytes, 0, row_bytes - bytes);
    }
    const VF32 c = LaneTrees(d, cc);
    StoreNorms(Scale(c, hn::Add(LaneTrees(d, rc), hn::Zero(d))), first, count);
  }

  static HWY_INLINE void StoreCodes(VU32 code, std::uint8_t* HWY_RESTRICT to) {
#if HWY_TARGET <= HWY_AVX3
    _mm_store_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(code.raw));
#else
    const hn::Rebind<std::uint8_t, DF32> d8;
    const hn::RebindToSigned<DF32> di;
    hn::StoreU(hn::DemoteTo(d8, hn::BitCast(di, code)), d8, to);
#endif
  }

  HWY_INLINE VF32 Scale(VF32 cc, VF32 rc) const {
    const DF32 d;
    const VF32 norm = hn::Load(d, norm_), tiny = hn::Set(d, kAuraTiny);
    const VF32 length = hn::Sqrt(cc);
    switch (d_.scale_rule) {
      case ScaleRule::matched:
        return hn::IfThenElse(hn::Gt(length, tiny), hn::Div(norm, length), norm);
      case ScaleRule::least_squares:
        return hn::IfThenElse(hn::Gt(length, tiny), hn::Mul(norm, hn::Div(rc, cc)), norm);
      case ScaleRule::unbiased: return hn::IfThenElse(hn::Gt(rc, tiny), hn::Div(norm, rc), norm);
      default: return norm;
    }
  }

  HWY_INLINE void StoreNorms(VF32 scale, std::int64_t first, std::int64_t count) {
    HWY_ALIGN float s[kF32Lanes];
    hn::Store(scale, DF32(), s);
    const std::int64_t stride = a_.scales.row_stride();
    for (std::int64_t i = 0; i < count; ++i) {
      const bool poisoned = (poisoned_ >> i & 1) != 0;
      const float value = poisoned ? std::numeric_limits<float>::quiet_NaN() : s[i];
      if (d_.f16_scale) {
        a_.scales.as<f16>()[(first + i) * stride] = to_f16(Clamped(value, max_finite<f16>()));
      } else {
        a_.scales.as<float>()[(first + i) * stride] = Clamped(value, max_finite<float>());
      }
    }
  }
  static float Clamped(float s, float most) { return s > most ? most : s < -most ? -most : s; }

  const AuraDesc& d_;
  const RowsToEncode a_;
  std::int64_t stride_, element_bytes_;
  RowRotation rotation_;
  CodePacker packer_;
  std::uint32_t poisoned_ = 0;  // rows that are not finite
  HWY_ALIGN float norm_[kF32Lanes], inv_[kF32Lanes];
  HWY_ALIGN float levels_[kAuraMaxDim];
  HWY_ALIGN float squares_[kAuraMaxDim] = {};
  HWY_ALIGN std::uint8_t codes_[kAuraMaxDim];
  HWY_ALIGN float tile_[kF32Lanes * kAuraMaxDim];
};

}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif
#endif
