// Tiles of products of bf16, with sums in f32, made of vdpbf16ps: for the target AVX3_DL, on CPUs
// that have it (cpu/bf16.h). The bits are not those of cpu/matmul-inl.h.
//
// A lane of 32 bits holds a pair: two numbers that are neighbours along the sum, the first in the
// low half. With a pair and a pair, in f32, rounded to nearest even,
//
//   sum = fma(a0, b0, fma(a1, b1, sum))
//
// Subnormal operands and sums count as 0, whatever the mode of the thread. NaN and infinities
// follow IEEE.
// Per-target include guard, as Highway's own -inl.h files have.
#if defined(BITTERN_CPU_BF16_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_CPU_BF16_INL_H_
#undef BITTERN_CPU_BF16_INL_H_
#else
#define BITTERN_CPU_BF16_INL_H_
#endif

#include <cstdint>

#include "cpu/unroll-inl.h"

#if BITTERN_SIMD && HWY_TARGET == HWY_AVX3_DL
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace pairs {

using DF = hn::FixedTag<float, 16>;
using DP = hn::RebindToUnsigned<DF>;  // pairs
using VF = hn::Vec<DF>;
using VP = hn::Vec<DP>;
inline constexpr std::int64_t kLanes = 16;

// Assembly, not intrinsics: Highway's options for this target leave out avx512bf16.

// sum + pair a . pair b
HWY_INLINE VF Dot(VF sum, VP a, VP b) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum.raw) : "v"(a.raw), "v"(b.raw));
  return sum;
}

// The elements of `low`, then those of `high`, rounded to bf16: the pairs of 32 neighbours.
HWY_INLINE VP Neighbours(VF low, VF high) {
  VP to;
  asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(to.raw) : "v"(high.raw), "v"(low.raw));
  return to;
}

// Pairs of what two vectors of 16 numbers each hold: pair i is element i of both.
struct Interleaver {
  VP index;
  HWY_INLINE Interleaver() {
    alignas(64) std::uint16_t at[32];
    for (int i = 0; i < 32; ++i) at[i] = static_cast<std::uint16_t>(i / 2 + i % 2 * 16);
    index = hn::Load(DP(), reinterpret_cast<const std::uint32_t*>(at));
  }
  HWY_INLINE VP operator()(VP both) const {
    return VP{_mm512_permutexvar_epi16(index.raw, both.raw)};
  }
  HWY_INLINE VP operator()(VF first, VF second) const { return (*this)(Neighbours(first, second)); }
};

// A left operand: pair p of row i is data[i + p * step].
struct Left {
  const std::uint32_t* data;
  std::int64_t step;
};

// A right operand: pair p of column j is data[p * step + j]. Add takes anything that gives vector v
// of pair p.
struct Right {
  const std::uint32_t* data;
  std::int64_t step;
  HWY_INLINE VP operator()(std::int64_t p, int v) const {
    return hn::LoadU(DP(), data + p * step + v * kLanes);
  }
};

// sum[r][v] += the products of row r of `a` with vector v of `b`, pairs [begin, end) ascending.
template <int kRows, int kVectors, class B>
HWY_INLINE void Add(const Left& a, const B& b, std::int64_t begin, std::int64_t end,
                    VF (&sum)[kRows][kVectors]) {
  for (std::int64_t p = begin; p < end; ++p) {
    VP right[kVectors];
    Unroll<kVectors>([&](auto v) BITTERN_INLINE_LAMBDA { right[v] = b(p, v); });
    const std::uint32_t* left = a.data + p * a.step;
    Unroll<kRows>([&](auto r) BITTERN_INLINE_LAMBDA {
      const VP x = hn::Set(DP(), left[r]);
      Unroll<kVectors>([&](auto v)
                           BITTERN_INLINE_LAMBDA { sum[r][v] = Dot(sum[r][v], right[v], x); });
    });
  }
}

// kRows rows of c, kVectors vectors wide; a, b and c begin there.
template <int kRows, int kVectors>
HWY_INLINE void Tile(std::int64_t count, const Left& a, const Right& b, const float* factor,
                     float* c, std::int64_t c_stride) {
  const DF df;
  VF sum[kRows][kVectors];
  const VF f = factor == nullptr ? hn::Zero(df) : hn::Set(df, *factor);
  Unroll<kRows>([&](auto r) BITTERN_INLINE_LAMBDA {
    Unroll<kVectors>([&](auto v) BITTERN_INLINE_LAMBDA {
      sum[r][v] = factor == nullptr ? hn::Zero(df)
                                    : hn::Mul(f, hn::LoadU(df, c + r * c_stride + v * kLanes));
    });
  });
  Add(a, b, 0, count, sum);
  Unroll<kRows>([&](auto r) BITTERN_INLINE_LAMBDA {
    Unroll<kVectors>([&](auto v) BITTERN_INLINE_LAMBDA {
      hn::StoreU(sum[r][v], df, c + r * c_stride + v * kLanes);
    });
  });
}

// f(first row, number of rows as a constant) for tiles that cover [0, rows).
inline constexpr int kTileRows = 8, kTileVectors = 2;
template <class F>
HWY_INLINE void ForTiles(std::int64_t rows, F&& f) {
  std::int64_t i = 0;
  for (; i + kTileRows <= rows; i += kTileRows) f(i, std::integral_constant<int, kTileRows>());
  if (i + 4 <= rows) {
    f(i, std::integral_constant<int, 4>());
    i += 4;
  }
  if (i + 2 <= rows) {
    f(i, std::integral_constant<int, 2>());
    i += 2;
  }
  if (i < rows) f(i, std::integral_constant<int, 1>());
}

template <int kVectors>
HWY_NOINLINE void MultiplyColumns(std::int64_t rows, std::int64_t count, const Left& a,
                                  const Right& b, const float* factor, float* c,
                                  std::int64_t c_stride) {
  ForTiles(rows, [&](std::int64_t i, auto tile) BITTERN_INLINE_LAMBDA {
    Tile<tile, kVectors>(count, {a.data + i, a.step}, b, factor, c + i * c_stride, c_stride);
  });
}

// c[rows, columns] = *factor c + a b, with sums over `count` pairs; factor null: c = a b. Columns
// of b and c are read and written in whole vectors.
inline void Multiply(std::int64_t rows, std::int64_t columns, std::int64_t count, const Left& a,
                     const Right& b, const float* factor, float* c, std::int64_t c_stride) {
  std::int64_t j = 0;
  for (; j + kTileVectors * kLanes < columns + kLanes; j += kTileVectors * kLanes)
    MultiplyColumns<kTileVectors>(rows, count, a, {b.data + j, b.step}, factor, c + j, c_stride);
  if (j < columns)
    MultiplyColumns<1>(rows, count, a, {b.data + j, b.step}, factor, c + j, c_stride);
}

}  // namespace pairs
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif
#endif
