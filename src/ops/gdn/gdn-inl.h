// What the gated delta rule's kernels share, on the tiles of gdn_scratch.h.
// Per-target include guard, as Highway's own -inl.h files have.
#if defined(BITTERN_CPU_GDN_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_CPU_GDN_INL_H_
#undef BITTERN_CPU_GDN_INL_H_
#else
#define BITTERN_CPU_GDN_INL_H_
#endif

#include "cpu/dot-inl.h"
#include "cpu/math-inl.h"
#include "cpu/tile-inl.h"
#include "ops/gdn/gdn.h"
#include "ops/gdn/gdn_scratch.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace gdn {

using cpu::gdn::kRows;
using cpu::gdn::Sums;
using matmul::Left;
using tile::Before;
using tile::D;
using tile::kLanes;
using tile::Padded;
using tile::Transpose;
using tile::V;

// Of x [batch, tokens, heads] one head's number per token of a chunk; zeros to the end.
inline void LoadRow(const ConstView& x, const GdnChunk& chunk, std::int64_t head, float* to) {
  const float* from = x.as<float>() + gdn_at(x, chunk.begin, head);
  for (std::int64_t i = 0; i < chunk.rows; ++i) to[i] = from[i * x.stride[1]];
  for (std::int64_t i = chunk.rows; i < kRows; ++i) to[i] = 0;
}

// Asks for the rows of one head and chunk of x [batch, tokens, heads, width] ahead of their use:
// they lie too far apart for the hardware to foresee.
template <class View>
void Prefetch(const View& x, const GdnChunk& chunk, std::int64_t head) {
  constexpr bool kWrite = std::is_same_v<View, MutView>;
  constexpr std::int64_t kLine = 64;
  const auto size = static_cast<std::int64_t>(size_of(x.dtype));
  const std::int64_t bytes = x.shape[3] * size;
  const auto* row = static_cast<const char*>(x.data) + gdn_at(x, chunk.begin, head) * size;
  for (std::int64_t t = 0; t < chunk.rows; ++t, row += x.stride[1] * size)
    for (std::int64_t i = 0; i < bytes; i += kLine) __builtin_prefetch(row + i, kWrite ? 1 : 0, 2);
}

// Rows of masked tokens become zeros.
inline void ClearMasked(const ConstView& mask, const GdnChunk& chunk, std::int64_t stride,
                        float* rows) {
  if (!mask) return;
  for (std::int64_t i = 0; i < chunk.rows; ++i)
    if (mask.as<std::uint8_t>()[chunk.begin + i] == 0) std::fill_n(rows + i * stride, stride, 0.0f);
}

// The rows of one head of x [batch, tokens, heads, width], to and from rows Padded(width) apart.
inline void LoadRows(const ConstView& x, const GdnChunk& chunk, std::int64_t head, float* to) {
  tile::Load(x, gdn_at(x, chunk.begin, head), x.stride[1], chunk.rows, x.shape[3], to,
             Padded(x.shape[3]));
}
inline void StoreRows(const float* from, const GdnChunk& chunk, std::int64_t head,
                      const MutView& x) {
  tile::Store(from, Padded(x.shape[3]), chunk.rows, x.shape[3], x, gdn_at(x, chunk.begin, head),
              x.stride[1]);
}
// Those of masked tokens as zeros.
inline void LoadRows(const ConstView& x, const ConstView& mask, const GdnChunk& chunk,
                     std::int64_t head, float* to) {
  LoadRows(x, chunk, head, to);
  ClearMasked(mask, chunk, Padded(x.shape[3]), to);
}

inline float InverseNorm(const float* x, std::int64_t n) {
  return 1.0f / std::sqrt(Dot(x, x, n) + 1e-6f);
}

// The inverse norms of keys or queries, rows Padded(key_dim) apart.
inline void InverseNorms(const GdnDesc& d, const float* x, std::int64_t rows, float* to) {
  for (std::int64_t i = 0; i < rows; ++i) to[i] = InverseNorm(x + i * Padded(d.key_dim), d.key_dim);
}

// Keys or queries, normalised where that is asked for.
inline void LoadKeys(const GdnDesc& d, const ConstView& x, const ConstView& mask,
                     const GdnChunk& chunk, std::int64_t key_head, float* to) {
  LoadRows(x, mask, chunk, key_head, to);
  if (!d.qk_l2norm) return;
  const std::int64_t stride = Padded(d.key_dim);
  for (std::int64_t i = 0; i < chunk.rows; ++i) {
    float* row = to + i * stride;
    tile::Scale(InverseNorm(row, d.key_dim), row, stride);
  }
}

// Log decays summed from the chunk's start, and strengths, of one value head. Masked tokens: 0.
template <class Args>
void LoadGates(const GdnDesc& d, const Args& a, const GdnChunk& chunk, std::int64_t h,
               const Sums& sums, float* beta) {
  float* sum = sums.high;
  const D tag;
  LoadRow(a.g, chunk, h, sum);
  LoadRow(a.beta, chunk, h, beta);
  if (d.gate) {
    const V rate = hn::Set(tag, -math::exp(a.a_log.template as<float>()[h]));
    const V bias = hn::Set(tag, a.dt_bias.template as<float>()[h]);
    for (std::int64_t i = 0; i < chunk.rows; i += kLanes)
      hn::StoreU(hn::Mul(rate, Softplus(tag, hn::Add(hn::LoadU(tag, sum + i), bias))), tag,
                 sum + i);
  }
  if (d.beta_sigmoid) {
    const V factor = hn::Set(tag, d.allow_neg_eigval ? 2.0f : 1.0f);
    for (std::int64_t i = 0; i < chunk.rows; i += kLanes)
      hn::StoreU(hn::Mul(factor, Sigmoid(tag, hn::LoadU(tag, beta + i))), tag, beta + i);
  }
  ClearMasked(a.mask, chunk, 1, sum);
  ClearMasked(a.mask, chunk, 1, beta);
  double total = 0;
  for (std::int64_t i = 0; i < chunk.rows; ++i) {
    total = gdn_next_sum(total, sum[i]);
    const GdnSum parts = gdn_sum(total);
    sums.high[i] = parts.high;
    sums.low[i] = parts.low;
  }
  std::fill(sums.high + chunk.rows, sums.high + kRows, 0.0f);
  std::fill(sums.low + chunk.rows, sums.low + kRows, 0.0f);
}

// out[i][j] = (factor[i] * x[i][j]) * e^(sum[i] - sum[j]) for j < i, and j = i if `diagonal`; zeros
// for the other j < columns. Without factors, x[i][j] * e^(...). The exponent is masked before use:
// above the diagonal it would overflow. Rows of x and out are kRows apart.
inline void Decay(std::int64_t rows, std::int64_t columns, const float* factor, const float* sum,
                  bool diagonal, const float* x, float* out) {
  const D d;
  for (std::int64_t i = 0; i < rows; ++i, x += kRows, out += kRows) {
    const V at_i = hn::Set(d, sum[i]);
    std::int64_t j = 0;
    for (; j <= i; j += kLanes) {
      const auto in = Before(j, diagonal ? i + 1 : i);
      V y = hn::LoadU(d, x + j);
      if (factor != nullptr) y = hn::Mul(hn::Set(d, factor[i]), y);
      const V exponent = hn::IfThenElseZero(in, hn::Sub(at_i, hn::LoadU(d, sum + j)));
      hn::StoreU(hn::IfThenElseZero(in, hn::Mul(y, Exp(d, exponent))), d, out + j);
    }
    for (; j < columns; j += kLanes) hn::StoreU(hn::Zero(d), d, out + j);
  }
}

// The chunk form's weights on and below the diagonal: E = e^(sum[i] - sum[j]), L = (beta k k^T) E
// below it, P = (q k^T) E. Where qk or e is null there is no P, and E is not kept.
inline void Weights(std::int64_t rows, const float* beta, const Sums& sum, const float* kk,
                    float* l, const float* qk = nullptr, float* p = nullptr, float* e = nullptr) {
  const D d;
  for (std::int64_t i = 0; i < rows; ++i) {
    const V high = hn::Set(d, sum.high[i]), low = hn::Set(d, sum.low[i]);
    const V strength = hn::Set(d, beta[i]);
    for (std::int64_t j = 0; j <= i; j += kLanes) {
      const std::int64_t at = i * kRows + j;
      const auto below = Before(j, i), on = Before(j, i + 1);
      const V decay = Exp(d, hn::Sub(high, hn::LoadU(d, sum.high + j)),
                          hn::Sub(low, hn::LoadU(d, sum.low + j)));
      const V x = hn::Mul(hn::Mul(strength, hn::LoadU(d, kk + at)), decay);
      hn::StoreU(hn::IfThenElseZero(below, x), d, l + at);
      if (qk != nullptr)
        hn::StoreU(hn::IfThenElseZero(on, hn::Mul(hn::LoadU(d, qk + at), decay)), d, p + at);
      if (e != nullptr) hn::StoreU(hn::IfThenElseZero(on, decay), d, e + at);
    }
  }
}

// e^sum of a row, and e^(last - sum).
inline void ExpRow(const Sums& sum, float* to) {
  const D d;
  for (std::int64_t i = 0; i < kRows; i += kLanes)
    hn::StoreU(Exp(d, hn::LoadU(d, sum.high + i), hn::LoadU(d, sum.low + i)), d, to + i);
}
inline void ExpRowFromLast(const Sums& sum, std::int64_t rows, float* to) {
  const D d;
  const V high = hn::Set(d, sum.high[rows - 1]), low = hn::Set(d, sum.low[rows - 1]);
  for (std::int64_t i = 0; i < rows; i += kLanes)
    hn::StoreU(
        Exp(d, hn::Sub(high, hn::LoadU(d, sum.high + i)), hn::Sub(low, hn::LoadU(d, sum.low + i))),
        d, to + i);
}

// e^x of a row, and e^(last - x).
inline void ExpRow(const float* x, float* to) {
  const D d;
  for (std::int64_t i = 0; i < kRows; i += kLanes)
    hn::StoreU(Exp(d, hn::LoadU(d, x + i)), d, to + i);
}
inline void ExpRowFrom(float last, const float* x, std::int64_t rows, float* to) {
  const D d;
  for (std::int64_t i = 0; i < rows; i += kLanes)
    hn::StoreU(Exp(d, hn::Sub(hn::Set(d, last), hn::LoadU(d, x + i))), d, to + i);
}

// A state between its tensor and rows of keys, Padded(value_dim) apart.
template <class X>
void LoadState(const GdnDesc& d, const X* from, std::int64_t row, float* state) {
  const std::int64_t stride = Padded(d.value_dim);
  if (d.state_layout == StateLayout::key_value) {
    tile::LoadAs(from, row, d.key_dim, d.value_dim, state, stride);
    return;
  }
  for (std::int64_t i = 0; i < d.key_dim; ++i)
    for (std::int64_t j = 0; j < stride; ++j)
      state[i * stride + j] = j < d.value_dim ? to_math(from[j * row + i]) : 0;
}
template <class X>
void StoreState(const GdnDesc& d, const float* state, X* to, std::int64_t row) {
  const std::int64_t stride = Padded(d.value_dim);
  if (d.state_layout == StateLayout::key_value) {
    tile::StoreAs(state, stride, d.key_dim, d.value_dim, to, row);
    return;
  }
  for (std::int64_t j = 0; j < d.value_dim; ++j)
    for (std::int64_t i = 0; i < d.key_dim; ++i)
      to[j * row + i] = from_math<X>(state[i * stride + j]);
}
// The same for dense states.
template <class X>
void LoadState(const GdnDesc& d, const X* from, float* state) {
  LoadState(d, from, d.state_shape()[3], state);
}
template <class X>
void StoreState(const GdnDesc& d, const float* state, X* to) {
  StoreState(d, state, to, d.state_shape()[3]);
}
// Of a sequence and head.
inline void LoadState(const GdnDesc& d, const ConstView& from, std::int64_t n, std::int64_t head,
                      float* state) {
  LoadState(d, from.as<float>() + from.at(n, head), from.stride[2], state);
}
inline void StoreState(const GdnDesc& d, const float* state, const MutView& to, std::int64_t n,
                       std::int64_t head) {
  StoreState(d, state, to.as<float>() + to.at(n, head), to.stride[2]);
}

}  // namespace gdn
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif
#endif
