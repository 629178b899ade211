#include "distill/f64_products.h"

#include <algorithm>

#include "cpu/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "distill/f64_products_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "cpu/simd-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using D = hn::ScalableTag<double>;
using V = hn::Vec<D>;
constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(D()));
// As in cpu/matmul-inl.h: 24 of AVX-512's 32 registers hold c, 12 of AVX2's 16.
constexpr int kTileRows = 6;
constexpr int kTileVectors = HWY_TARGET == HWY_AVX2 ? 2 : 4;
constexpr std::int64_t kDepth = 128;  // rows of b that are in a cache while all rows of a pass

template <int kRows, int kVectors>
HWY_INLINE void Tile(const LeftF64& a, const double* b, std::int64_t b_stride, double* c,
                     std::int64_t c_stride, std::int64_t depth) {
  const D d;
  V sum[kRows][kVectors];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::LoadU(d, c + r * c_stride + v * kLanes);
  for (std::int64_t k = 0; k < depth; ++k) {
    V right[kVectors];
    for (int v = 0; v < kVectors; ++v) right[v] = hn::LoadU(d, b + k * b_stride + v * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const V x = hn::Set(d, a.data[r * a.row + k * a.column]);
      for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::NegMulAdd(x, right[v], sum[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) hn::StoreU(sum[r][v], d, c + r * c_stride + v * kLanes);
}

template <int kVectors>
HWY_NOINLINE void Panel(std::int64_t rows, std::int64_t depth, LeftF64 a, const double* b,
                        std::int64_t b_stride, double* c, std::int64_t c_stride) {
  std::int64_t r = 0;
  const auto rest = [&] { return LeftF64{a.data + r * a.row, a.row, a.column}; };
  for (; r + kTileRows <= rows; r += kTileRows)
    Tile<kTileRows, kVectors>(rest(), b, b_stride, c + r * c_stride, c_stride, depth);
  if (r + 4 <= rows) {
    Tile<4, kVectors>(rest(), b, b_stride, c + r * c_stride, c_stride, depth);
    r += 4;
  }
  for (; r < rows; ++r) Tile<1, kVectors>(rest(), b, b_stride, c + r * c_stride, c_stride, depth);
}

void SubtractProduct(std::int64_t rows, std::int64_t columns, std::int64_t depth, const LeftF64& a,
                     const double* b, std::int64_t b_stride, double* c, std::int64_t c_stride) {
  for (std::int64_t k = 0; k < depth; k += kDepth) {
    const std::int64_t count = std::min(kDepth, depth - k);
    const LeftF64 left{a.data + k * a.column, a.row, a.column};
    const double* const right = b + k * b_stride;
    std::int64_t j = 0;
    for (; j + kTileVectors * kLanes <= columns; j += kTileVectors * kLanes)
      Panel<kTileVectors>(rows, count, left, right + j, b_stride, c + j, c_stride);
    for (; j < columns; j += kLanes)
      Panel<1>(rows, count, left, right + j, b_stride, c + j, c_stride);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD

#if HWY_ONCE
namespace bittern {
namespace {

BITTERN_EXPORT(SubtractProduct);

}  // namespace

void subtract_product(std::int64_t rows, std::int64_t columns, std::int64_t depth, const LeftF64& a,
                      const double* b, std::int64_t b_stride, double* c, std::int64_t c_stride) {
  BITTERN_CALL(SubtractProduct)(rows, columns, depth, a, b, b_stride, c, c_stride);
}

}  // namespace bittern
#endif  // HWY_ONCE
