// A chunk of the gated delta rule with products of bf16 (cpu/bf16-inl.h): kernel cpu_bf16 of
// gdn_chunk_forward, whose header says what is rounded. Matrices over tokens are transposed, so
// that all pairs are made of neighbouring rows.
#if defined(BITTERN_OPS_GDN_CHUNK_FORWARD_PAIRS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_OPS_GDN_CHUNK_FORWARD_PAIRS_INL_H_
#undef BITTERN_OPS_GDN_CHUNK_FORWARD_PAIRS_INL_H_
#else
#define BITTERN_OPS_GDN_CHUNK_FORWARD_PAIRS_INL_H_
#endif

#include <cstring>

#include "bittern/ops/gdn_chunk_forward.h"
#include "cpu/bf16-inl.h"
#include "ops/gdn/gdn-inl.h"

#if BITTERN_SIMD && HWY_TARGET == HWY_AVX3_DL
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using cpu::gdn::PairScratch;

// Rows of keys or queries as pairs, those of masked tokens as zeros, 0 after the last element.
void CopyRows(const ConstView& x, const ConstView& mask, const GdnChunk& chunk, std::int64_t head,
              std::uint32_t* to, std::int64_t stride) {
  const auto bytes = static_cast<std::size_t>(x.shape[3]) * sizeof(bf16);
  for (std::int64_t i = 0; i < chunk.rows; ++i, to += stride) {
    const bool masked = mask && mask.as<std::uint8_t>()[chunk.begin + i] == 0;
    const std::size_t copied = masked ? 0 : bytes;
    if (!masked) std::memcpy(to, x.as<bf16>() + gdn_at(x, chunk.begin + i, head), copied);
    std::memset(reinterpret_cast<std::byte*>(to) + copied, 0,
                static_cast<std::size_t>(stride) * sizeof *to - copied);
  }
}

// 16 bf16 each from `first` and `second`, in pairs.
HWY_INLINE pairs::VP PairsOf(const pairs::Interleaver& interleave, const std::uint32_t* first,
                             const std::uint32_t* second) {
  const hn::Half<pairs::DP> half;
  return interleave(hn::Combine(pairs::DP(), hn::LoadU(half, second), hn::LoadU(half, first)));
}

// What the value heads of one key head share.
void LoadKeys(const GdnDesc& d, const GdnChunkForward::Args& a, const GdnChunk& chunk,
              std::int64_t key_head, const PairScratch& s) {
  const pairs::DP dp;
  const std::int64_t rows = chunk.rows, key_pairs = (d.key_dim + 1) / 2;
  const std::int64_t stride = gdn::Padded(key_pairs), width = gdn::Padded(d.key_dim);
  const auto factors = [&](const ConstView& x, float factor, float* to) {
    std::fill_n(to, gdn::kRows, 1.0f);
    if (d.qk_l2norm) {
      gdn::LoadRows(x, a.mask, chunk, key_head, s.wide);
      gdn::InverseNorms(d, s.wide, rows, to);
    }
    for (std::int64_t i = 0; i < rows; ++i) to[i] *= factor;
  };
  factors(a.k, 1, s.k_factor);
  factors(a.q, d.query_scale(), s.q_factor);

  CopyRows(a.q, a.mask, chunk, key_head, s.rows, stride);
  gdn::Transpose(s.rows, stride, rows, key_pairs, s.queries, gdn::kRows);
  CopyRows(a.k, a.mask, chunk, key_head, s.rows, stride);
  gdn::Transpose(s.rows, stride, rows, key_pairs, s.keys, gdn::kRows);
  const pairs::Interleaver interleave;
  for (std::int64_t i = 0; i < rows; i += 2) {
    const std::uint32_t* row = s.rows + i * stride;
    std::uint32_t* to = s.keys_by_token + i / 2 * width;
    const std::uint32_t zeros[pairs::kLanes / 2] = {};
    for (std::int64_t m = 0; m < width; m += pairs::kLanes, row += pairs::kLanes / 2)
      hn::StoreU(PairsOf(interleave, row, i + 1 < rows ? row + stride : zeros), dp, to + m);
  }
  // On and above the diagonal, 16 rows at a time.
  for (std::int64_t j = 0; j < rows; j += pairs::kLanes) {
    const std::int64_t tile = std::min(pairs::kLanes, rows - j), at = j * gdn::kRows + j;
    const pairs::Left left{s.keys + j, gdn::kRows};
    pairs::Multiply(tile, rows - j, key_pairs, left, {s.keys + j, gdn::kRows}, nullptr, s.kk + at,
                    gdn::kRows);
    pairs::Multiply(tile, rows - j, key_pairs, left, {s.queries + j, gdn::kRows}, nullptr,
                    s.kq + at, gdn::kRows);
  }
}

// L and P, transposed, with zeros below the diagonal of a pair of rows.
void Weights(std::int64_t rows, const PairScratch& s) {
  const gdn::D d;
  const pairs::Interleaver interleave;
  const auto row = [&](std::int64_t j, std::int64_t i) HWY_ATTR {  // of P; L's is stored
    const std::int64_t at = j * gdn::kRows + i;
    const auto decay = Exp(d, hn::Sub(hn::LoadU(d, s.sum.high + i), hn::Set(d, s.sum.high[j])),
                           hn::Sub(hn::LoadU(d, s.sum.low + i), hn::Set(d, s.sum.low[j])));
    const auto factor = hn::Set(d, s.k_factor[j]);
    const auto strength = hn::Mul(hn::LoadU(d, s.beta + i), hn::LoadU(d, s.k_factor + i));
    const auto l = hn::Mul(hn::Mul(strength, hn::Mul(factor, hn::LoadU(d, s.kk + at))), decay);
    const auto p = hn::Mul(
        hn::Mul(hn::LoadU(d, s.q_factor + i), hn::Mul(factor, hn::LoadU(d, s.kq + at))), decay);
    hn::StoreU(hn::IfThenZeroElse(gdn::Before(i, j + 1), l), d, s.l + at);
    const auto kept = hn::IfThenZeroElse(gdn::Before(i, j), p);
    hn::StoreU(kept, d, s.p + at);
    return kept;
  };
  for (std::int64_t j = 0; j < rows; j += 2) {
    for (std::int64_t i = j / gdn::kLanes * gdn::kLanes; i < rows; i += gdn::kLanes) {
      const auto first = row(j, i);
      const auto second = j + 1 < rows ? row(j + 1, i) : hn::Zero(d);
      hn::StoreU(interleave(first, second), pairs::DP(), s.p_pairs + j / 2 * gdn::kRows + i);
    }
  }
}

// y in pairs, and so its rows times what is left of them at the chunk's end.
void PairRows(std::int64_t rows, std::int64_t width, const float* rest, const PairScratch& s) {
  const gdn::D d;
  const pairs::DP dp;
  const pairs::Interleaver interleave;
  for (std::int64_t j = 0; j < rows; j += 2) {
    const bool both = j + 1 < rows;
    const auto f0 = hn::Set(d, rest[j]), f1 = hn::Set(d, both ? rest[j + 1] : 0.0f);
    for (std::int64_t c = 0; c < width; c += gdn::kLanes) {
      const auto y0 = hn::LoadU(d, s.y + j * width + c);
      const auto y1 = both ? hn::LoadU(d, s.y + (j + 1) * width + c) : hn::Zero(d);
      const std::int64_t at = j / 2 * width + c;
      hn::StoreU(interleave(y0, y1), dp, s.y_pairs + at);
      hn::StoreU(interleave(hn::Mul(f0, y0), hn::Mul(f1, y1)), dp, s.rest_pairs + at);
    }
  }
}

// o = factor o + P y. The terms of a tile's own rows are f32: nothing of a token may reach those
// before it, and 0 * NaN would.
template <int kVectors>
HWY_NOINLINE void AddOutputs(std::int64_t rows, std::int64_t c, std::int64_t width,
                             const PairScratch& s) {
  const pairs::DF df;
  const pairs::Right right{s.y_pairs + c, width};
  pairs::ForTiles(rows, [&](std::int64_t i, auto tile) BITTERN_INLINE_LAMBDA {
    float* o = s.o + i * width + c;
    pairs::VF sum[tile][kVectors];
    Unroll<tile>([&](auto r) BITTERN_INLINE_LAMBDA {
      const auto factor = hn::Set(df, s.decay[i + r] * s.q_factor[i + r]);
      Unroll<kVectors>([&](auto v) BITTERN_INLINE_LAMBDA {
        sum[r][v] = hn::Mul(factor, hn::LoadU(df, o + r * width + v * pairs::kLanes));
      });
    });
    pairs::Add(pairs::Left{s.p_pairs + i, gdn::kRows}, right, 0, i / 2, sum);
    Unroll<tile>([&](auto j) BITTERN_INLINE_LAMBDA {
      const float* y = s.y + (i + j) * width + c;
      const float* p = s.p + (i + j) * gdn::kRows + i;
      Unroll<kVectors>([&](auto v) BITTERN_INLINE_LAMBDA {
        const auto term = hn::LoadU(df, y + v * pairs::kLanes);
        Unroll<tile>([&](auto r) BITTERN_INLINE_LAMBDA {
          if constexpr (r >= j) sum[r][v] = hn::MulAdd(hn::Set(df, p[r]), term, sum[r][v]);
        });
      });
    });
    Unroll<tile>([&](auto r) BITTERN_INLINE_LAMBDA {
      Unroll<kVectors>([&](auto v) BITTERN_INLINE_LAMBDA {
        hn::StoreU(sum[r][v], df, o + r * width + v * pairs::kLanes);
      });
    });
  });
}

void RunChunk(const GdnDesc& d, const GdnChunkForward::Args& a, const GdnChunk& chunk,
              std::int64_t h, float* state, const PairScratch& s) {
  const gdn::D tag;
  const pairs::DP dp;
  const std::int64_t rows = chunk.rows, width = gdn::Padded(d.value_dim);
  const std::int64_t key_pairs = (d.key_dim + 1) / 2;
  gdn::Prefetch(a.o, chunk, h);
  gdn::LoadGates(d, a, chunk, h, s.sum, s.beta);
  gdn::ExpRow(s.sum, s.decay);
  Weights(rows, s);

  const pairs::Interleaver interleave;
  for (std::int64_t m = 0; m < d.key_dim; m += 2) {
    const float* from = state + m * width;
    for (std::int64_t c = 0; c < width; c += gdn::kLanes) {
      const auto second = m + 1 < d.key_dim ? hn::LoadU(tag, from + width + c) : hn::Zero(tag);
      hn::StoreU(interleave(hn::LoadU(tag, from + c), second), dp,
                 s.state_pairs + m / 2 * width + c);
    }
  }
  const pairs::Right right{s.state_pairs, width};
  pairs::Multiply(rows, width, key_pairs, {s.keys, gdn::kRows}, right, nullptr, s.y, width);
  pairs::Multiply(rows, width, key_pairs, {s.queries, gdn::kRows}, right, nullptr, s.o, width);
  gdn::LoadRows(a.v, a.mask, chunk, h, s.v);
  for (std::int64_t i = 0; i < rows; ++i) {
    const auto decay = hn::Set(tag, s.decay[i] * s.k_factor[i]), beta = hn::Set(tag, s.beta[i]);
    for (std::int64_t j = i * width; j < (i + 1) * width; j += gdn::kLanes) {
      const auto seen = hn::LoadU(tag, s.y + j), v = hn::LoadU(tag, s.v + j);
      hn::StoreU(hn::Mul(beta, hn::NegMulAdd(decay, seen, v)), tag, s.y + j);
    }
  }
  matmul::SolveLower(rows, d.value_dim, {s.l, 1, gdn::kRows}, s.y, width);

  alignas(64) float rest[gdn::kRows];
  gdn::ExpRowFromLast(s.sum, rows, rest);
  for (std::int64_t i = 0; i < rows; ++i) rest[i] *= s.k_factor[i];
  PairRows(rows, width, rest, s);
  std::int64_t c = 0;
  for (; c + 2 * pairs::kLanes <= width; c += 2 * pairs::kLanes) AddOutputs<2>(rows, c, width, s);
  if (c < width) AddOutputs<1>(rows, c, width, s);
  gdn::ClearMasked(a.mask, chunk, width, s.o);
  gdn::StoreRows(s.o, chunk, h, a.o);

  pairs::Multiply(d.key_dim, width, (rows + 1) / 2, {s.keys_by_token, gdn::Padded(d.key_dim)},
                  {s.rest_pairs, width}, s.decay + rows - 1, state, width);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif
#endif
