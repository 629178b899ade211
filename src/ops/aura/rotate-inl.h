// The rotations of bittern/aura_desc.h on rows of f32, the same operations as ops/aura/aura.h.
//
//   const RowRotation rotation(kind, dim, table);
//   rotation.Apply(rows, stride, count, inverse);    rows[i * stride + j] := (P rows[i])_j
//
// Rows whose length is a power of two take a Hadamard rotation one by one, in registers. All else
// works on kF32Lanes rows at once, transposed so that a row is a lane: then every operation is a
// plain one on vectors, whatever the length.
#if defined(BITTERN_CPU_ROTATE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_CPU_ROTATE_INL_H_
#undef BITTERN_CPU_ROTATE_INL_H_
#else
#define BITTERN_CPU_ROTATE_INL_H_
#endif

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>

#include "cpu/simd-inl.h"
#include "ops/aura/aura.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {

// ---- transposing ----

using DF32 = hn::ScalableTag<float>;
using VF32 = hn::Vec<DF32>;
inline constexpr auto kF32Lanes = static_cast<std::int64_t>(hn::MaxLanes(DF32()));

// v[i] lane j <-> v[j] lane i
HWY_INLINE void TransposeLanes(VF32* HWY_RESTRICT v) {
  const DF32 d;
  const hn::RepartitionToWide<DF32> dw;
  // 4 x 4 inside each 128-bit block
  for (std::int64_t i = 0; i < kF32Lanes; i += 4) {
    const auto low01 = hn::BitCast(dw, hn::InterleaveLower(d, v[i], v[i + 1]));
    const auto low23 = hn::BitCast(dw, hn::InterleaveLower(d, v[i + 2], v[i + 3]));
    const auto high01 = hn::BitCast(dw, hn::InterleaveUpper(d, v[i], v[i + 1]));
    const auto high23 = hn::BitCast(dw, hn::InterleaveUpper(d, v[i + 2], v[i + 3]));
    v[i] = hn::BitCast(d, hn::InterleaveLower(dw, low01, low23));
    v[i + 1] = hn::BitCast(d, hn::InterleaveUpper(dw, low01, low23));
    v[i + 2] = hn::BitCast(d, hn::InterleaveLower(dw, high01, high23));
    v[i + 3] = hn::BitCast(d, hn::InterleaveUpper(dw, high01, high23));
  }
  // then the blocks
  for (std::int64_t i = 0; i < 4; ++i) {
    if constexpr (kF32Lanes == 8) {
      const VF32 low = v[i], high = v[i + 4];
      v[i] = hn::ConcatLowerLower(d, high, low);
      v[i + 4] = hn::ConcatUpperUpper(d, high, low);
    } else {
#if HWY_TARGET <= HWY_AVX3
      const __m512 a = v[i].raw, b = v[i + 4].raw, c = v[i + 8].raw, e = v[i + 12].raw;
      const __m512 ab02 = _mm512_shuffle_f32x4(a, b, 0x88), ab13 = _mm512_shuffle_f32x4(a, b, 0xdd);
      const __m512 ce02 = _mm512_shuffle_f32x4(c, e, 0x88), ce13 = _mm512_shuffle_f32x4(c, e, 0xdd);
      v[i] = VF32{_mm512_shuffle_f32x4(ab02, ce02, 0x88)};
      v[i + 4] = VF32{_mm512_shuffle_f32x4(ab13, ce13, 0x88)};
      v[i + 8] = VF32{_mm512_shuffle_f32x4(ab02, ce02, 0xdd)};
      v[i + 12] = VF32{_mm512_shuffle_f32x4(ab13, ce13, 0xdd)};
#endif
    }
  }
}

// columns[j * kF32Lanes + i] = x_ij for i < count (0 beyond), j < dim; load(i, j) gives x_ij and
// the lanes after it, of which those beyond dim are not looked at.
template <class Load>
HWY_INLINE void RowsToLanes(const Load& load, std::int64_t count, std::int64_t dim,
                            float* HWY_RESTRICT columns) {
  const DF32 d;
  for (std::int64_t j = 0; j < dim; j += kF32Lanes) {
    const std::int64_t width = std::min(dim - j, kF32Lanes);
    VF32 v[kF32Lanes];
    for (std::int64_t i = 0; i < kF32Lanes; ++i) v[i] = i < count ? load(i, j) : hn::Zero(d);
    TransposeLanes(v);
    for (std::int64_t i = 0; i < width; ++i) hn::Store(v[i], d, columns + (j + i) * kF32Lanes);
  }
}

// The way back, for columns j .. j + width - 1, which are in v.
HWY_INLINE void StoreLanes(VF32* HWY_RESTRICT v, std::int64_t j, std::int64_t width,
                           std::int64_t count, float* HWY_RESTRICT rows, std::int64_t stride) {
  const DF32 d;
  const auto mask = hn::FirstN(d, static_cast<std::size_t>(width));
  for (std::int64_t i = width; i < kF32Lanes; ++i) v[i] = hn::Zero(d);
  TransposeLanes(v);
  for (std::int64_t i = 0; i < count; ++i) hn::BlendedStore(v[i], mask, d, rows + i * stride + j);
}
inline HWY_NOINLINE void LanesToRows(const float* HWY_RESTRICT columns, std::int64_t dim,
                                     std::int64_t count, float* HWY_RESTRICT rows,
                                     std::int64_t stride) {
  for (std::int64_t j = 0; j < dim; j += kF32Lanes) {
    const std::int64_t width = std::min(dim - j, kF32Lanes);
    VF32 v[kF32Lanes];
    for (std::int64_t i = 0; i < width; ++i) v[i] = hn::Load(DF32(), columns + (j + i) * kF32Lanes);
    StoreLanes(v, j, width, count, rows, stride);
  }
}

// ---- butterflies ----

// Stages 1, 2, ... kCount / 2 over the vectors v[0 .. kCount).
template <int kCount>
HWY_INLINE void Butterflies(VF32* HWY_RESTRICT v) {
  for (int h = 1; h < kCount; h *= 2) {
    for (int j = 0; j < kCount; ++j) {
      if ((j & h) != 0) continue;
      const VF32 a = v[j], b = v[j + h];
      v[j] = hn::Add(a, b);
      v[j + h] = hn::Sub(a, b);
    }
  }
}

// at[0], at[step], ... at[(kCount - 1) step]
template <int kCount>
HWY_INLINE void ButterfliesAt(float* HWY_RESTRICT at, std::int64_t step) {
  const DF32 d;
  VF32 v[kCount];
  for (int i = 0; i < kCount; ++i) v[i] = hn::LoadU(d, at + i * step);
  Butterflies<kCount>(v);
  for (int i = 0; i < kCount; ++i) hn::StoreU(v[i], d, at + i * step);
}

// Stages first, 2 first, ... n/2 over blocks of n vectors, `vectors` in all.
HWY_INLINE void ButterfliesFrom(std::int64_t first, std::int64_t n, std::int64_t vectors,
                                float* HWY_RESTRICT at) {
  for (std::int64_t h = first, radix; h < n; h *= radix) {
    radix = std::min<std::int64_t>(n / h, 8);
    for (std::int64_t block = 0; block < vectors; block += h * radix) {
      for (std::int64_t i = block; i < block + h; ++i) {
        if (radix == 8) {
          ButterfliesAt<8>(at + i * kF32Lanes, h * kF32Lanes);
        } else if (radix == 4) {
          ButterfliesAt<4>(at + i * kF32Lanes, h * kF32Lanes);
        } else {
          ButterfliesAt<2>(at + i * kF32Lanes, h * kF32Lanes);
        }
      }
    }
  }
}

// The stages inside a vector: (a, b) -> (a + b, a - b) is b + (+1) a in one lane, a + (-1) b in the
// other.
class LaneButterflies {
 public:
  LaneButterflies() {
    const DF32 d;
    HWY_ALIGN float sign[kF32Lanes];
    for (int stage = 0; stage < kStages; ++stage) {
      for (std::int64_t i = 0; i < kF32Lanes; ++i) sign[i] = (i >> stage & 1) != 0 ? -1.0f : 1.0f;
      sign_[stage] = hn::Load(d, sign);
    }
  }
  HWY_INLINE VF32 operator()(VF32 v) const {
    const DF32 d;
    v = hn::MulAdd(v, sign_[0], hn::Shuffle2301(v));
    v = hn::MulAdd(v, sign_[1], hn::Shuffle1032(v));
    v = hn::MulAdd(v, sign_[2], hn::SwapAdjacentBlocks(v));
    if constexpr (kF32Lanes == 16) v = hn::MulAdd(v, sign_[3], hn::ConcatLowerUpper(d, v, v));
    return v;
  }

 private:
  static constexpr int kStages = kF32Lanes == 16 ? 4 : 3;
  VF32 sign_[kStages];
};

// ---- products ----

// kOut sums of m terms: sums[o] = sum over c of matrix[o * row + c * column] in[c * step], by fma,
// c ascending, from 0.
template <int kOut>
HWY_INLINE void LaneProducts(const float* HWY_RESTRICT matrix, std::int64_t row,
                             std::int64_t column, std::int64_t m, const float* HWY_RESTRICT in,
                             std::int64_t step, VF32* HWY_RESTRICT sums) {
  const DF32 d;
  for (int o = 0; o < kOut; ++o) sums[o] = hn::Zero(d);
  // A pointer for every four rows: more would not fit the registers.
  constexpr int kFours = (kOut + 3) / 4;
  const float* four[kFours];
  for (int o = 0; o < kFours; ++o) four[o] = matrix + 4 * o * row;
  const std::int64_t row2 = 2 * row, row3 = 3 * row;
  for (std::int64_t c = 0; c < m; ++c) {
    const VF32 x = hn::Load(d, in + c * step);
    for (int o = 0; o < kOut; ++o) {
      const std::int64_t offset = o % 4 == 0 ? 0 : o % 4 == 1 ? row : o % 4 == 2 ? row2 : row3;
      sums[o] = hn::MulAdd(hn::Set(d, four[o / 4][offset]), x, sums[o]);
    }
    for (int o = 0; o < kFours; ++o) four[o] += column;
  }
}

// rows[i] := M x_i for i < count, where x_i is lane i of `in` [m].
inline HWY_NOINLINE void MultiplyToRows(const float* HWY_RESTRICT matrix, std::int64_t m,
                                        bool transpose, const float* HWY_RESTRICT in,
                                        std::int64_t count, float* HWY_RESTRICT rows,
                                        std::int64_t stride) {
  const DF32 d;
  const std::int64_t row = transpose ? 1 : m, column = transpose ? m : 1;
  for (std::int64_t a = 0; a < m; a += kF32Lanes) {
    const std::int64_t width = std::min(m - a, kF32Lanes);
    VF32 sums[kF32Lanes];
    if (width == kF32Lanes) {
      LaneProducts<kF32Lanes>(matrix + a * row, row, column, m, in, kF32Lanes, sums);
    } else {
      for (std::int64_t o = 0; o < width; ++o)
        LaneProducts<1>(matrix + (a + o) * row, row, column, m, in, kF32Lanes, sums + o);
    }
    StoreLanes(sums, a, width, count, rows, stride);
  }
}

// ---- H_m ----

// Step 3 of a hadamard rotation: of every four terms the eight sums up to sign, and these with the
// other sign, lie in a table, from which each result takes one.
class FactorSums {
 public:
  // Of H_m or its transpose. Made once.
  static const FactorSums& Of(std::int64_t m, bool transpose) {
    constexpr std::size_t kCount = std::size(kHadamardFactors);
    static const auto all = [] {
      std::array<FactorSums, 2 * kCount> made;
      for (std::size_t i = 0; i < 2 * kCount; ++i)
        made[i] = FactorSums(kHadamardFactors[i % kCount], i >= kCount);
      return made;
    }();
    const auto* at = std::find(std::begin(kHadamardFactors), std::end(kHadamardFactors), m);
    return all[static_cast<std::size_t>(at - std::begin(kHadamardFactors)) +
               (transpose ? kCount : 0)];
  }
  FactorSums() = default;

  // out := H_m in, on vectors [m, n]; m is not 1
  HWY_NOINLINE void Apply(std::int64_t n, const float* HWY_RESTRICT in,
                          float* HWY_RESTRICT out) const {
    const DF32 d;
    const std::int64_t step = n * kF32Lanes, fours = m_ / 4;
    HWY_ALIGN float sums[kMostFactor / 4 * kSums * kF32Lanes];
    for (std::int64_t b = 0; b < n; ++b) {
      for (std::int64_t k = 0; k < fours; ++k) {
        const auto t = [&](std::int64_t i) HWY_ATTR {
          return hn::Load(d, in + (4 * k + i) * step + b * kF32Lanes);
        };
        const VF32 low[2] = {hn::Add(t(0), t(1)), hn::Sub(t(0), t(1))};
        const VF32 high[2] = {hn::Add(t(2), t(3)), hn::Sub(t(2), t(3))};
        for (int i = 0; i < 4; ++i) {
          const VF32 both[2] = {hn::Add(low[i % 2], high[i / 2]), hn::Sub(low[i % 2], high[i / 2])};
          for (int minus = 0; minus < 2; ++minus) {
            float* to = sums + (k * kSums + i + 4 * minus) * kF32Lanes;
            hn::Store(both[minus], d, to);
            hn::Store(hn::Neg(both[minus]), d, to + kNegative * kF32Lanes);
          }
        }
      }
      for (std::int64_t a = 0; a < m_; a += 4) {
        const std::uint8_t* which = which_ + a * fours;
        VF32 acc[4];
        for (int o = 0; o < 4; ++o) acc[o] = hn::Load(d, sums + which[o * fours] * kF32Lanes);
        for (std::int64_t k = 1; k < fours; ++k) {
          for (int o = 0; o < 4; ++o) {
            const float* sum = sums + (k * kSums + which[o * fours + k]) * kF32Lanes;
            acc[o] = hn::Add(acc[o], hn::Load(d, sum));
          }
        }
        for (int o = 0; o < 4; ++o) hn::Store(acc[o], d, out + (a + o) * step + b * kF32Lanes);
      }
    }
  }

 private:
  FactorSums(std::int64_t m, bool transpose) : m_(m) {
    const float* matrix = hadamard_matrix(m);
    for (std::int64_t a = 0; a < m; ++a) {
      for (std::int64_t k = 0; k < m / 4; ++k) {
        const auto h = [&](std::int64_t i) {
          return matrix[transpose ? (4 * k + i) * m + a : a * m + 4 * k + i];
        };
        which_[a * (m / 4) + k] =
            static_cast<std::uint8_t>((h(0) != h(1) ? 1 : 0) + (h(2) != h(3) ? 2 : 0) +
                                      (h(0) != h(2) ? 4 : 0) + (h(0) < 0 ? kNegative : 0));
      }
    }
  }

  static constexpr int kSums = 16, kNegative = 8;
  static constexpr std::int64_t kMostFactor = 60;

  std::int64_t m_ = 1;
  std::uint8_t which_[kMostFactor * kMostFactor / 4] = {};  // [m, m / 4]
};

// ---- rows ----

HWY_INLINE std::int64_t RoundUpToLanes(std::int64_t n) {
  return (n + kF32Lanes - 1) / kF32Lanes * kF32Lanes;
}

// x[0, n) as f32, and zeros up to a whole vector.
template <class X>
HWY_INLINE void LoadRow(const X* HWY_RESTRICT x, std::int64_t n, float* HWY_RESTRICT row) {
  const DF32 d;
  std::int64_t j = 0;
  for (; j + kF32Lanes <= n; j += kF32Lanes) hn::StoreU(LoadMath(d, x + j), d, row + j);
  for (; j < n; ++j) row[j] = to_math(x[j]);
  for (; j < RoundUpToLanes(n); ++j) row[j] = 0;
}
template <class X>
HWY_INLINE void StoreRow(const float* HWY_RESTRICT row, std::int64_t n, X* HWY_RESTRICT x) {
  const DF32 d;
  std::int64_t j = 0;
  for (; j + kF32Lanes <= n; j += kF32Lanes) StoreMath(d, hn::LoadU(d, row + j), x + j);
  for (; j < n; ++j) x[j] = from_math<X>(row[j]);
}

class RowRotation {
 public:
  RowRotation(Rotation kind, std::int64_t dim, const float* table)
      : kind_(kind), dim_(dim), table_(table) {
    if (kind == Rotation::hadamard) {
      factor_ = hadamard_factor(dim);
      scale_ = hadamard_scale(dim);
      for (std::int64_t j = 0; j < dim; ++j) scaled_[j] = table[j] * scale_;
    }
  }

  void Apply(float* rows, std::int64_t stride, std::int64_t count, bool inverse) const {
    if (kind_ == Rotation::identity) return;
    if (InRegisters()) {
      for (std::int64_t i = 0; i < count; ++i) {
        float* row = rows + i * stride;
        const auto load = [&](std::int64_t j) HWY_ATTR { return hn::LoadU(DF32(), row + j); };
        if (inverse) {
          HadamardInverse(row);
        } else {
          Hadamard(load, row);
        }
      }
      return;
    }
    for (std::int64_t i = 0; i < count; i += kF32Lanes) {
      float* at = rows + i * stride;
      const auto load = [&](std::int64_t k, std::int64_t j) HWY_ATTR {
        const auto width = static_cast<std::size_t>(std::min(dim_ - j, kF32Lanes));
        return hn::MaskedLoad(hn::FirstN(DF32(), width), DF32(), at + k * stride + j);
      };
      ApplyFrom(load, at, stride, std::min(count - i, kF32Lanes), inverse);
    }
  }

  // Whether Hadamard() serves.
  bool InRegisters() const {
    return kind_ == Rotation::hadamard && factor_ == 1 && dim_ % kF32Lanes == 0;
  }

  // row := P x, where load(j) gives x_j .. x_{j + kF32Lanes - 1}.
  template <class Load>
  HWY_INLINE void Hadamard(const Load& load, float* row) const {
    HadamardStages([&](std::int64_t j)
                       HWY_ATTR { return hn::Mul(load(j), hn::Load(DF32(), scaled_ + j)); },
                   row);
  }
  // row := P (factor x)
  template <class Load>
  HWY_INLINE void Hadamard(float factor, const Load& load, float* row) const {
    const DF32 d;
    const VF32 scale = hn::Set(d, factor * scale_);
    HadamardStages(
        [&](std::int64_t j)
            HWY_ATTR { return hn::Mul(load(j), hn::Mul(hn::LoadU(d, table_ + j), scale)); },
        row);
  }

  // rows[i] := P x_i, or P^T x_i, for count <= kF32Lanes rows; load(i, j) gives x_ij and the lanes
  // after it, and may read from `rows`. With `factors`, of a hadamard rotation, P (factors[i] x_i).
  template <class Load>
  HWY_NOINLINE void ApplyFrom(const Load& load, float* rows, std::int64_t stride,
                              std::int64_t count, bool inverse,
                              const float* factors = nullptr) const {
    HWY_ALIGN float in[kAuraMaxDim * kF32Lanes], out[kAuraMaxDim * kF32Lanes];
    RowsToLanes(load, count, dim_, in);
    if (kind_ == Rotation::dense) {
      MultiplyToRows(table_, dim_, inverse, in, count, rows, stride);
      return;
    }
    const std::int64_t n = dim_ / factor_;
    const DF32 d;
    VF32 scale = hn::Set(d, scale_);
    if (factors != nullptr) scale = hn::Mul(scale, hn::Load(d, factors));
    MultiplyEach([&](std::int64_t j)
                     HWY_ATTR { return inverse ? scale : hn::Mul(scale, hn::Set(d, table_[j])); },
                 in);
    if (!inverse) ButterfliesFrom(1, n, dim_, in);
    float* result = in;
    if (factor_ > 1) {
      FactorSums::Of(factor_, inverse).Apply(n, in, out);
      result = out;
    }
    if (inverse) {
      ButterfliesFrom(1, n, dim_, result);
      MultiplyEach([&](std::int64_t j) HWY_ATTR { return hn::Set(d, table_[j]); }, result);
    }
    LanesToRows(result, dim_, count, rows, stride);
  }

 private:
  void HadamardInverse(float* row) const {
    const DF32 d;
    const VF32 scale = hn::Set(d, scale_);
    HadamardStages([&](std::int64_t j) HWY_ATTR { return hn::Mul(hn::LoadU(d, row + j), scale); },
                   row);
    for (std::int64_t j = 0; j < dim_; j += kF32Lanes)
      hn::StoreU(hn::Mul(hn::LoadU(d, row + j), hn::LoadU(d, table_ + j)), d, row + j);
  }

  // As many stages as fit registers on the way in, the others from memory to memory.
  template <class Load>
  HWY_INLINE void HadamardStages(const Load& load, float* row) const {
    const std::int64_t vectors = dim_ / kF32Lanes;
    if (vectors >= 8) {
      for (std::int64_t i = 0; i < vectors; i += 8) FirstStages<8>(load, i, row);
      ButterfliesFrom(8, vectors, vectors, row);
    } else if (vectors == 4) {
      FirstStages<4>(load, 0, row);
    } else if (vectors == 2) {
      FirstStages<2>(load, 0, row);
    } else {
      FirstStages<1>(load, 0, row);
    }
  }
  template <int kCount, class Load>
  HWY_INLINE void FirstStages(const Load& load, std::int64_t first, float* row) const {
    VF32 v[kCount];
    for (int i = 0; i < kCount; ++i) v[i] = lanes_(load((first + i) * kF32Lanes));
    Butterflies<kCount>(v);
    for (int i = 0; i < kCount; ++i) hn::StoreU(v[i], DF32(), row + (first + i) * kF32Lanes);
  }

  template <class Factor>
  HWY_INLINE void MultiplyEach(const Factor& factor, float* HWY_RESTRICT columns) const {
    const DF32 d;
    for (std::int64_t j = 0; j < dim_; ++j) {
      float* at = columns + j * kF32Lanes;
      hn::Store(hn::Mul(hn::Load(d, at), factor(j)), d, at);
    }
  }

  Rotation kind_;
  std::int64_t dim_;
  const float* table_;
  std::int64_t factor_ = 1;
  float scale_ = 1;
  LaneButterflies lanes_;
  HWY_ALIGN float scaled_[kAuraMaxDim];  // sign_j d^-1/2
};

}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif
#endif
