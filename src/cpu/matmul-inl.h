// Small matrix products in a fixed order, for operands that are in cache.
//
//   c[i][j] = fma(a[i][k], b[k][j], ...), k ascending, from 0 or from c[i][j]
//
// Vectors run only over j and each element has one accumulator, so the bits depend only on the
// operands. a is read one element at a time with any two strides, so a transposed left operand
// costs nothing. Rows of b and c are contiguous, and are read and written in whole vectors: their
// strides leave room for that (`Padded`), and the values in the padding are undefined.
// Per-target include guard, as Highway's own -inl.h files have.
#if defined(BITTERN_CPU_MATMUL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_CPU_MATMUL_INL_H_
#undef BITTERN_CPU_MATMUL_INL_H_
#else
#define BITTERN_CPU_MATMUL_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include "cpu/simd-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace matmul {

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;
inline constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(D()));

// Elements of a row of whole vectors.
constexpr std::int64_t Padded(std::int64_t columns) {
  return (columns + kLanes - 1) / kLanes * kLanes;
}

// A tile of kTileRows rows and kTileVectors vectors of c is kept in registers: 24 of AVX-512's 32,
// 12 of AVX2's 16.
inline constexpr int kTileRows = 6;
inline constexpr int kTileVectors = HWY_TARGET == HWY_AVX2 ? 2 : 4;

// The elements (i, k) of a matrix with i + begin <= k < i + end.
struct Band {
  std::int64_t begin = 0, end = 0;
};

// A left operand: element (i, k) is data[i * row + k * column].
struct Left {
  const float* data;
  std::int64_t row;
  std::int64_t column = 1;
  Band band{};  // of Kind::band
};

// Which terms row i has, and what is done with their sum.
enum class Kind {
  full,         // k < depth
  lower,        // k <= i: the left operand is lower triangular
  upper,        // k >= i: it is upper triangular; `depth` is the number of rows
  band,         // k < depth inside the left operand's band
  solve_lower,  // k < i, and c[i][j] - sum replaces c[i][j], which is b[i][j] of the rows below
  solve_upper,  // k > i, descending, and the same with the rows above
};

// Rows `first` .. first + kRows - 1 of c, kVectors vectors wide; `a`, b and c are the whole
// operands.
template <Kind kKind, int kRows, int kVectors>
HWY_INLINE void Tile(const Left& a, const float* b, std::int64_t b_stride, float* c,
                     std::int64_t c_stride, std::int64_t first, std::int64_t depth, bool from_c) {
  const D d;
  const float* left = a.data + first * a.row;
  float* out = c + first * c_stride;
  V sum[kRows][kVectors];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v)
      sum[r][v] = from_c ? hn::LoadU(d, out + r * c_stride + v * kLanes) : hn::Zero(d);
  const auto add = [&](std::int64_t k) HWY_ATTR {  // a term of every row
    V right[kVectors];
    for (int v = 0; v < kVectors; ++v) right[v] = hn::LoadU(d, b + k * b_stride + v * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const V x = hn::Set(d, left[r * a.row + k * a.column]);
      for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::MulAdd(x, right[v], sum[r][v]);
    }
  };
  const auto add_diagonal = [&](int s) HWY_ATTR {  // term first + s of the rows that have it
    constexpr bool kSolve = kKind == Kind::solve_lower || kKind == Kind::solve_upper;
    constexpr bool kLower = kKind == Kind::lower || kKind == Kind::solve_lower;
    V right[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (kSolve) {
        sum[s][v] = hn::Sub(hn::LoadU(d, out + s * c_stride + v * kLanes), sum[s][v]);
        right[v] = sum[s][v];
      } else {
        right[v] = hn::LoadU(d, b + (first + s) * b_stride + v * kLanes);
      }
    }
    const int begin = kLower ? (kSolve ? s + 1 : s) : 0;
    const int end = kLower ? kRows : (kSolve ? s : s + 1);
    for (int r = begin; r < end; ++r) {
      const V x = hn::Set(d, left[r * a.row + (first + s) * a.column]);
      for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::MulAdd(x, right[v], sum[r][v]);
    }
  };
  if constexpr (kKind == Kind::full) {
    for (std::int64_t k = 0; k < depth; ++k) add(k);
  } else if constexpr (kKind == Kind::band) {
    const auto begin = [&](int r) {
      return std::clamp<std::int64_t>(first + r + a.band.begin, 0, depth);
    };
    const auto end = [&](int r) {
      return std::clamp<std::int64_t>(first + r + a.band.end, 0, depth);
    };
    const auto add_some = [&](std::int64_t k) HWY_ATTR {  // to the rows that have term k
      for (int r = 0; r < kRows; ++r) {
        if (k < begin(r) || k >= end(r)) continue;
        const V x = hn::Set(d, left[r * a.row + k * a.column]);
        for (int v = 0; v < kVectors; ++v)
          sum[r][v] = hn::MulAdd(x, hn::LoadU(d, b + k * b_stride + v * kLanes), sum[r][v]);
      }
    };
    std::int64_t k = begin(0);
    for (; k < begin(kRows - 1); ++k) add_some(k);
    for (; k < end(0); ++k) add(k);
    for (; k < end(kRows - 1); ++k) add_some(k);
  } else if constexpr (kKind == Kind::lower || kKind == Kind::solve_lower) {
    for (std::int64_t k = 0; k < first; ++k) add(k);
    for (int s = 0; s < kRows; ++s) add_diagonal(s);
  } else if constexpr (kKind == Kind::upper) {
    for (int s = 0; s < kRows; ++s) add_diagonal(s);
    for (std::int64_t k = first + kRows; k < depth; ++k) add(k);
  } else {
    for (std::int64_t k = depth - 1; k >= first + kRows; --k) add(k);
    for (int s = kRows - 1; s >= 0; --s) add_diagonal(s);
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) hn::StoreU(sum[r][v], d, out + r * c_stride + v * kLanes);
}

// Rows [first, rows) of c, kVectors vectors wide; from the last one up where each needs those
// below.
template <Kind kKind, int kVectors>
HWY_NOINLINE void Panel(std::int64_t first, std::int64_t rows, const Left& a, const float* b,
                        std::int64_t b_stride, float* c, std::int64_t c_stride, std::int64_t depth,
                        bool from_c) {
  std::int64_t done = 0;
  const std::int64_t count = rows - first;
  const auto at = [&](std::int64_t tile_rows) {
    return kKind == Kind::solve_upper ? rows - done - tile_rows : first + done;
  };
  for (; done + kTileRows <= count; done += kTileRows)
    Tile<kKind, kTileRows, kVectors>(a, b, b_stride, c, c_stride, at(kTileRows), depth, from_c);
  if (done + 4 <= count) {
    Tile<kKind, 4, kVectors>(a, b, b_stride, c, c_stride, at(4), depth, from_c);
    done += 4;
  }
  if (done + 2 <= count) {
    Tile<kKind, 2, kVectors>(a, b, b_stride, c, c_stride, at(2), depth, from_c);
    done += 2;
  }
  if (done < count) Tile<kKind, 1, kVectors>(a, b, b_stride, c, c_stride, at(1), depth, from_c);
}

template <Kind kKind>
void Panels(std::int64_t first, std::int64_t rows, std::int64_t columns, const Left& a,
            const float* b, std::int64_t b_stride, float* c, std::int64_t c_stride,
            std::int64_t depth, bool from_c) {
  std::int64_t j = 0;
  for (; j + kTileVectors * kLanes <= Padded(columns); j += kTileVectors * kLanes)
    Panel<kKind, kTileVectors>(first, rows, a, b + j, b_stride, c + j, c_stride, depth, from_c);
  if constexpr (kTileVectors > 2) {
    if (j + 2 * kLanes <= Padded(columns)) {
      Panel<kKind, 2>(first, rows, a, b + j, b_stride, c + j, c_stride, depth, from_c);
      j += 2 * kLanes;
    }
  }
  if (j < columns) Panel<kKind, 1>(first, rows, a, b + j, b_stride, c + j, c_stride, depth, from_c);
}

// c[rows, columns] = a[rows, depth] b[depth, columns], onto c when from_c.
inline void Multiply(std::int64_t rows, std::int64_t columns, std::int64_t depth, const Left& a,
                     const float* b, std::int64_t b_stride, float* c, std::int64_t c_stride,
                     bool from_c = false) {
  Panels<Kind::full>(0, rows, columns, a, b, b_stride, c, c_stride, depth, from_c);
}

// The same for a lower triangular a[rows, rows]: row i has the terms k <= i alone.
inline void MultiplyLower(std::int64_t rows, std::int64_t columns, const Left& a, const float* b,
                          std::int64_t b_stride, float* c, std::int64_t c_stride,
                          bool from_c = false) {
  Panels<Kind::lower>(0, rows, columns, a, b, b_stride, c, c_stride, 0, from_c);
}

// For an upper triangular a[rows, rows]: the terms k >= i.
inline void MultiplyUpper(std::int64_t rows, std::int64_t columns, const Left& a, const float* b,
                          std::int64_t b_stride, float* c, std::int64_t c_stride,
                          bool from_c = false) {
  Panels<Kind::upper>(0, rows, columns, a, b, b_stride, c, c_stride, rows, from_c);
}

// The elements j <= i of c[rows, rows] = a[rows, depth] b[depth, rows]; those above the diagonal
// are undefined.
inline void MultiplyToLower(std::int64_t rows, std::int64_t depth, const Left& a, const float* b,
                            std::int64_t b_stride, float* c, std::int64_t c_stride) {
  for (std::int64_t i = 0; i < rows; i += 2 * kTileRows) {
    const std::int64_t end = std::min(rows, i + 2 * kTileRows);
    Panels<Kind::full>(i, end, end, a, b, b_stride, c, c_stride, depth, false);
  }
}

// The same for an a[rows, depth] of which only a.band is read: row i has the terms inside it.
inline void MultiplyBand(std::int64_t rows, std::int64_t columns, std::int64_t depth, const Left& a,
                         const float* b, std::int64_t b_stride, float* c, std::int64_t c_stride,
                         bool from_c = false) {
  Panels<Kind::band>(0, rows, columns, a, b, b_stride, c, c_stride, depth, from_c);
}

// The elements inside `band` of c[rows, columns] = a[rows, depth] b[depth, columns]; the others are
// undefined.
inline void MultiplyToBand(std::int64_t rows, std::int64_t columns, std::int64_t depth,
                           const Band& band, const Left& a, const float* b, std::int64_t b_stride,
                           float* c, std::int64_t c_stride) {
  for (std::int64_t i = 0; i < rows; i += 2 * kTileRows) {
    const std::int64_t end = std::min(rows, i + 2 * kTileRows);
    const std::int64_t left = std::max<std::int64_t>(i + band.begin, 0) / kLanes * kLanes;
    const std::int64_t right = std::min(columns, end - 1 + band.end);
    if (left < right)
      Panels<Kind::full>(i, end, right - left, a, b + left, b_stride, c + left, c_stride, depth,
                         false);
  }
}

// Solves (I + a) x = c for a strictly lower triangular a[rows, rows]; x takes the place of c.
// Row i is c[i] - (sum of a[i][k] x[k], k < i).
inline void SolveLower(std::int64_t rows, std::int64_t columns, const Left& a, float* c,
                       std::int64_t stride) {
  Panels<Kind::solve_lower>(0, rows, columns, a, c, stride, c, stride, 0, false);
}

// The same for a strictly upper triangular a; the sum is over k > i, descending.
inline void SolveUpper(std::int64_t rows, std::int64_t columns, const Left& a, float* c,
                       std::int64_t stride) {
  Panels<Kind::solve_upper>(0, rows, columns, a, c, stride, c, stride, rows, false);
}

}  // namespace matmul
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif
#endif
