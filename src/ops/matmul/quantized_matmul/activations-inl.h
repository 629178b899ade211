// Rows of x, quantised, as floats or as pairs of bf16, into tiles (work.h).
#if defined(BITTERN_OPS_QUANTIZED_MATMUL_ACTIVATIONS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_OPS_QUANTIZED_MATMUL_ACTIVATIONS_INL_H_
#undef BITTERN_OPS_QUANTIZED_MATMUL_ACTIVATIONS_INL_H_
#else
#define BITTERN_OPS_QUANTIZED_MATMUL_ACTIVATIONS_INL_H_
#endif

#include <cstring>
#include <limits>

#include "cpu/bf16-inl.h"
#include "ops/matmul/activations.h"
#include "ops/matmul/expand-inl.h"
#include "ops/matmul/quantized_matmul/work.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

// The four bytes of each 16 lanes' four codes, as words of the tile.
HWY_INLINE void StoreQuads(VI codes, std::int64_t tile, std::uint8_t* to) {
  const hn::Rebind<std::int8_t, DI> d8;
  alignas(16) std::int8_t bytes[16];
  hn::StoreU(hn::DemoteTo(d8, codes), d8, bytes);
  for (int i = 0; i < kWidth / 4; ++i) std::memcpy(to + 4 * i * tile, bytes + 4 * i, 4);
}

// Row r of a tile of `tile` rows: codes go to x, factors to `factors`.
template <class X>
void QuantiseRow(const matmul::Work& work, const X* HWY_RESTRICT from, std::int64_t tile,
                 std::int64_t r, std::uint8_t* HWY_RESTRICT x, float* HWY_RESTRICT factors) {
  const DF df;
  const DI di;
  const DU du;
  const QuantizedMatmulDesc& d = work.d;
  const bool wide = work.planes == 2;
  const std::int64_t group = d.x_group(), run = d.run(), inputs = d.weights.inputs;
  const float full_scale = wide ? matmul::kInt16Scale : matmul::kInt8Scale;
  const int offset = OffsetOf(d.weights);
  const std::int64_t plane = 8 * 4 * tile;  // bytes of a chunk's plane
  for (std::int64_t first = 0; first < inputs; first += group) {
    VU most = hn::Zero(du);  // magnitudes are ordered as their bits are
    for (std::int64_t k = first; k < first + group; k += kWidth)
      most = hn::Max(most, hn::BitCast(du, hn::Abs(LoadMath(df, from + k))));
    const std::uint32_t bits = hn::GetLane(hn::MaxOfLanes(du, most));
    float scale = 0;
    if (bits >= 0x7f800000u) {
      scale = std::numeric_limits<float>::quiet_NaN();
    } else if (bits != 0) {
      scale = std::max(std::bit_cast<float>(bits) / full_scale, matmul::kLeastScale);
    }
    const bool zero = !(scale > 0);
    const VF divisor = hn::Set(df, zero ? 1.0f : scale);
    // Far from the ends of the exponents a product gives what the division gives (DivideBy).
    const bool quick = scale > 0x1p-80f && scale < 0x1p80f;
    const VF inverse = hn::Div(hn::Set(df, 1.0f), divisor);
    for (std::int64_t start = first; start < first + group; start += run) {
      VI sum = hn::Zero(di);
      for (std::int64_t k = start; k < start + run; k += kWidth) {
        const VF value = LoadMath(df, from + k);
        const VI codes = zero ? hn::Zero(di)
                              : hn::NearestInt(quick ? DivideBy(divisor, inverse, value)
                                                     : hn::Div(value, divisor));
        sum = hn::Add(sum, codes);
        const std::int64_t chunk = k / matmul::kChunk, quad = k % matmul::kChunk / 4;
        std::uint8_t* to = x + chunk * work.planes * plane + (quad * tile + r) * 4;
        if (wide) {
          const VI high = hn::ShiftRight<8>(hn::Add(codes, hn::Set(di, 128)));
          StoreQuads(high, tile, to);
          StoreQuads(hn::Sub(codes, hn::ShiftLeft<8>(high)), tile, to + plane);
        } else {
          StoreQuads(codes, tile, to);
        }
      }
      const std::int32_t total = hn::GetLane(hn::SumOfLanes(di, sum));
      float* at = factors + start / run * 3 * tile + r;
      at[0] = scale;
      at[tile] = scale * static_cast<float>(total);
      at[2 * tile] = std::bit_cast<float>(-offset * total);
    }
  }
}

template <class X>
void FloatRow(const matmul::Work& work, const X* HWY_RESTRICT from, std::int64_t tile,
              std::int64_t r, float* HWY_RESTRICT x) {
  for (std::int64_t k = 0; k < work.d.weights.inputs; ++k) x[k * tile + r] = to_math(from[k]);
}

#if HWY_TARGET == HWY_AVX3_DL
// 32 inputs as pairs.
HWY_INLINE pairs::VP LoadPairs(const float* from) {
  const DF df;
  return pairs::Neighbours(hn::LoadU(df, from), hn::LoadU(df, from + kWidth));
}
HWY_INLINE pairs::VP LoadPairs(const bf16* from) {
  return hn::LoadU(pairs::DP(), reinterpret_cast<const std::uint32_t*>(from));
}

template <class X>
void PairRow(const matmul::Work& work, const X* HWY_RESTRICT from, std::int64_t tile,
             std::int64_t r, std::uint32_t* HWY_RESTRICT x) {
  constexpr std::int64_t kInputs = 2 * pairs::kLanes;
  alignas(64) std::uint32_t words[pairs::kLanes];
  for (std::int64_t k = 0; k < work.d.weights.inputs; k += kInputs) {
    const std::int64_t count = std::min(kInputs, work.d.weights.inputs - k);
    if (count == kInputs) {
      hn::Store(LoadPairs(from + k), pairs::DP(), words);
    } else {
      X last[kInputs] = {};
      std::copy_n(from + k, count, last);
      hn::Store(LoadPairs(last), pairs::DP(), words);
    }
    for (std::int64_t i = 0; 2 * i < count; ++i) x[(k / 2 + i) * tile + r] = words[i];
  }
}
#endif

// Rows [begin, end) of a block.
void PackRows(const matmul::Work& work, const ConstView& x, const matmul::PackedRows& to,
              std::int64_t begin, std::int64_t end) {
  (void)visit<float, bf16>(work.d.element, [&]<class X>(Type<X>) {
    std::int64_t first = 0;
    for (std::int64_t m = begin; m < end; ++m) {
      while (m >= first + matmul::tile_rows(to.rows - first))
        first += matmul::tile_rows(to.rows - first);
      const std::int64_t tile = matmul::tile_rows(to.rows - first);
      const X* from = x.as<X>() + (to.first + m) * x.row_stride();
      std::uint8_t* const packed = to.x + first * work.x_row_bytes();
      switch (work.terms) {
        case matmul::Terms::integers:
          QuantiseRow(work, from, tile, m - first, packed, to.factors + first * work.runs * 3);
          break;
        case matmul::Terms::floats:
          FloatRow(work, from, tile, m - first, reinterpret_cast<float*>(packed));
          break;
        case matmul::Terms::pairs:
#if HWY_TARGET == HWY_AVX3_DL
          PairRow(work, from, tile, m - first, reinterpret_cast<std::uint32_t*>(packed));
#endif
          break;
      }
    }
    return Status();
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD
#endif
