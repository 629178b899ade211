// Rows of x, quantised or as floats, into tiles (work.h).
#if defined(BITTERN_OPS_QUANTIZED_MATMUL_ACTIVATIONS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_OPS_QUANTIZED_MATMUL_ACTIVATIONS_INL_H_
#undef BITTERN_OPS_QUANTIZED_MATMUL_ACTIVATIONS_INL_H_
#else
#define BITTERN_OPS_QUANTIZED_MATMUL_ACTIVATIONS_INL_H_
#endif

#include <cstring>
#include <limits>

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

// Rows [begin, end) of a block.
void PackRows(const matmul::Work& work, const ConstView& x, const matmul::PackedRows& to,
              std::int64_t begin, std::int64_t end) {
  const std::int64_t inputs = work.d.weights.inputs;
  (void)visit<float, bf16>(work.d.element, [&]<class X>(Type<X>) {
    std::int64_t first = 0;
    for (std::int64_t m = begin; m < end; ++m) {
      while (m >= first + matmul::tile_rows(to.rows - first))
        first += matmul::tile_rows(to.rows - first);
      const std::int64_t tile = matmul::tile_rows(to.rows - first);
      const X* from = x.as<X>() + (to.first + m) * x.row_stride();
      if (work.exact) {
        FloatRow(work, from, tile, m - first, reinterpret_cast<float*>(to.x) + first * inputs);
      } else {
        QuantiseRow(work, from, tile, m - first, to.x + first * inputs * work.planes,
                    to.factors + first * work.runs * 3);
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
