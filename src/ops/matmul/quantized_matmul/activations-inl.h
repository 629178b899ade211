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

using D8 = hn::CappedTag<std::int8_t, 16>;
using V8 = hn::Vec<D8>;

// 16 integers as bytes.
template <int kVectors>
HWY_INLINE V8 ToBytes(const VI (&codes)[kVectors]) {
  const hn::Rebind<std::int8_t, DI> d8;
  if constexpr (kVectors == 1) {
    return hn::DemoteTo(d8, codes[0]);
  } else {
    return hn::Combine(D8(), hn::DemoteTo(d8, codes[1]), hn::DemoteTo(d8, codes[0]));
  }
}

// 16 codes of each row of a tile: of every four codes the rows' words lie together.
template <int kRows>
HWY_INLINE void StoreQuads(const V8 (&bytes)[kRows], std::uint8_t* to) {
  const hn::Repartition<std::uint32_t, D8> d32;
  const hn::Repartition<std::uint64_t, D8> d64;
  const auto put = [&](auto v, int i) HWY_ATTR {
    hn::StoreU(hn::BitCast(D8(), v), D8(), reinterpret_cast<std::int8_t*>(to) + 16 * i);
  };
  if constexpr (kRows == 1) {
    put(bytes[0], 0);
  } else {
    const auto low = [&](int r) HWY_ATTR {
      return hn::BitCast(d64, hn::InterleaveLower(d32, hn::BitCast(d32, bytes[r]),
                                                  hn::BitCast(d32, bytes[r + 1])));
    };
    const auto high = [&](int r) HWY_ATTR {
      return hn::BitCast(d64, hn::InterleaveUpper(d32, hn::BitCast(d32, bytes[r]),
                                                  hn::BitCast(d32, bytes[r + 1])));
    };
    if constexpr (kRows == 2) {
      put(low(0), 0);
      put(high(0), 1);
    } else {
      put(hn::InterleaveLower(d64, low(0), low(2)), 0);
      put(hn::InterleaveUpper(d64, low(0), low(2)), 1);
      put(hn::InterleaveLower(d64, high(0), high(2)), 2);
      put(hn::InterleaveUpper(d64, high(0), high(2)), 3);
    }
  }
}

// A group of a row: its scale, and how to divide by it.
struct XGroup {
  float scale;
  bool zero;   // all codes are 0
  bool quick;  // far from the ends of the exponents a product gives what the division gives
  VF divisor, inverse;

  template <class X>
  HWY_INLINE void Measure(const X* from, std::int64_t group, float full_scale) {
    const DF df;
    const DU du;
    VU most = hn::Zero(du);  // magnitudes are ordered as their bits are
    for (std::int64_t k = 0; k < group; k += kWidth)
      most = hn::Max(most, hn::BitCast(du, hn::Abs(LoadMath(df, from + k))));
    const std::uint32_t bits = hn::GetLane(hn::MaxOfLanes(du, most));
    scale = 0;
    if (bits >= 0x7f800000u) {
      scale = std::numeric_limits<float>::quiet_NaN();
    } else if (bits != 0) {
      scale = std::max(std::bit_cast<float>(bits) / full_scale, matmul::kLeastScale);
    }
    zero = !(scale > 0);
    quick = scale > 0x1p-80f && scale < 0x1p80f;
    divisor = hn::Set(df, zero ? 1.0f : scale);
    inverse = hn::Div(hn::Set(df, 1.0f), divisor);
  }

  HWY_INLINE VI Codes(VF x) const {
    if (zero) return hn::Zero(DI());
    return hn::NearestInt(quick ? DivideBy(divisor, inverse, x) : hn::Div(x, divisor));
  }
};

// A tile of kRows rows, `stride` apart: codes go to x, factors to `factors`.
template <int kRows, class X>
HWY_NOINLINE void QuantiseTile(const matmul::Work& work, const X* HWY_RESTRICT from,
                               std::int64_t stride, std::uint8_t* HWY_RESTRICT x,
                               float* HWY_RESTRICT factors) {
  const DI di;
  const QuantizedMatmulDesc& d = work.d;
  const bool wide = work.planes == 2;
  const std::int64_t group = d.x_group(), run = d.run();
  const float full_scale = wide ? matmul::kInt16Scale : matmul::kInt8Scale;
  const int offset = OffsetOf(d.weights);
  constexpr std::int64_t kQuads = 16 * kRows;              // bytes of 16 inputs
  constexpr std::int64_t kPlane = kRows * matmul::kChunk;  // and of a chunk's plane
  for (std::int64_t first = 0; first < d.weights.inputs; first += group) {
    XGroup groups[kRows];
    for (int r = 0; r < kRows; ++r) groups[r].Measure(from + r * stride + first, group, full_scale);
    for (std::int64_t start = first; start < first + group; start += run) {
      VI sum[kRows];
      for (VI& s : sum) s = hn::Zero(di);
      for (std::int64_t k = start; k < start + run; k += 16) {
        std::uint8_t* to =
            x + k / matmul::kChunk * work.planes * kPlane + k % matmul::kChunk / 16 * kQuads;
        V8 high[kRows], low[kRows];
        for (int r = 0; r < kRows; ++r) {
          VI codes[kParts], upper[kParts];
          for (int part = 0; part < kParts; ++part) {
            codes[part] = groups[r].Codes(LoadMath(DF(), from + r * stride + k + part * kWidth));
            sum[r] = hn::Add(sum[r], codes[part]);
            if (!wide) continue;
            upper[part] = hn::ShiftRight<8>(hn::Add(codes[part], hn::Set(di, 128)));
            codes[part] = hn::Sub(codes[part], hn::ShiftLeft<8>(upper[part]));
          }
          low[r] = ToBytes(codes);
          if (wide) high[r] = ToBytes(upper);
        }
        if (wide) StoreQuads(high, to);
        StoreQuads(low, wide ? to + kPlane : to);
      }
      for (int r = 0; r < kRows; ++r) {
        const std::int32_t total = hn::GetLane(hn::SumOfLanes(di, sum[r]));
        float* at = factors + start / run * 3 * kRows + r;
        at[0] = groups[r].scale;
        at[kRows] = groups[r].scale * static_cast<float>(total);
        at[2 * kRows] = std::bit_cast<float>(-offset * total);
      }
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

// kRows rows of a tile of `tile` rows, 1 or 4.
template <int kRows, class X>
void PairRows(std::int64_t inputs, const X* HWY_RESTRICT from, std::int64_t stride,
              std::int64_t tile, std::uint32_t* HWY_RESTRICT x) {
  constexpr std::int64_t kInputs = 2 * pairs::kLanes;
  alignas(64) std::uint32_t words[kRows * pairs::kLanes];
  for (std::int64_t k = 0; k < inputs; k += kInputs) {
    const std::int64_t count = std::min(kInputs, inputs - k);
    pairs::VP row[kRows];
    for (int r = 0; r < kRows; ++r) {
      const X* const at = from + r * stride + k;
      if (count == kInputs) {
        row[r] = LoadPairs(at);
      } else {
        X last[kInputs] = {};
        std::copy_n(at, count, last);
        row[r] = LoadPairs(last);
      }
    }
    if constexpr (kRows == 4) {
      hn::StoreInterleaved4(row[0], row[1], row[2], row[3], pairs::DP(), words);
    } else {
      hn::Store(row[0], pairs::DP(), words);
    }
    for (std::int64_t i = 0; 2 * i < count; ++i)
      std::memcpy(x + (k / 2 + i) * tile, words + kRows * i, kRows * sizeof(std::uint32_t));
  }
}
#endif

// Rows [begin, end) of a block: whole tiles.
void PackRows(const matmul::Work& work, const ConstView& x, const matmul::PackedRows& to,
              std::int64_t begin, std::int64_t end) {
  const std::int64_t stride = x.row_stride();
  (void)visit<float, bf16>(work.d.element, [&]<class X>(Type<X>) {
    for (std::int64_t first = begin, tile; first < end; first += tile) {
      tile = work.tile_rows(to.rows - first);
      const X* from = x.as<X>() + (to.first + first) * stride;
      std::uint8_t* const packed = to.x + first * work.x_row_bytes();
      if (work.terms == matmul::Terms::integers) {
        const auto quantise = tile == 4   ? QuantiseTile<4, X>
                              : tile == 2 ? QuantiseTile<2, X>
                                          : QuantiseTile<1, X>;
        quantise(work, from, stride, packed, to.factors + first * work.runs * 3);
        continue;
      }
      if (work.terms == matmul::Terms::floats) {
        for (std::int64_t r = 0; r < tile; ++r)
          FloatRow(work, from + r * stride, tile, r, reinterpret_cast<float*>(packed));
        continue;
      }
#if HWY_TARGET == HWY_AVX3_DL
      auto* const words = reinterpret_cast<std::uint32_t*>(packed);
      const std::int64_t at_once = tile % 4 == 0 ? 4 : 1, inputs = work.d.weights.inputs;
      const auto pack = at_once == 4 ? PairRows<4, X> : PairRows<1, X>;
      for (std::int64_t r = 0; r < tile; r += at_once)
        pack(inputs, from + r * stride, stride, tile, words + r);
#endif
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
