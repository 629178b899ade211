// A token's step of the delta rule on one head's state: what the cpu kernels that go token by token
// share.
#if defined(BITTERN_CPU_GDN_STEP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_CPU_GDN_STEP_INL_H_
#undef BITTERN_CPU_GDN_STEP_INL_H_
#else
#define BITTERN_CPU_GDN_STEP_INL_H_
#endif

#include "cpu/dot-inl.h"
#include "cpu/math-inl.h"
#include "cpu/stream-inl.h"
#include "ops/gdn/gdn.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace gdn_step {

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;
inline constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(D()));
inline constexpr std::int64_t kMaxDim = 256;

// What a token brings to one head, widened, and what comes of it. Rows are padded to whole vectors.
struct Token {
  alignas(64) float q[kMaxDim];
  alignas(64) float k[kMaxDim];
  alignas(64) float v[kMaxDim];
  alignas(64) float delta[kMaxDim];
  alignas(64) float o[kMaxDim];
  float decay, beta, kq;
};

template <class X>
void Widen(const X* from, std::int64_t n, float* to) {
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) hn::Store(LoadMath(D(), from + i), D(), to + i);
  for (; i < n; ++i) to[i] = to_math(from[i]);
}

template <class X>
void Narrow(const float* from, std::int64_t n, X* to) {
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) StoreMath(D(), hn::Load(D(), from + i), to + i);
  for (; i < n; ++i) to[i] = from_math<X>(from[i]);
}

inline void Scale(float* x, std::int64_t n, float by) {
  for (std::int64_t i = 0; i < n; ++i) x[i] *= by;
}

// k and q, widened: normalised and scaled.
inline void PrepareKeys(const GdnStepDesc& d, Token& t) {
  if (d.qk_l2norm) {
    Scale(t.q, d.key_dim, 1.0f / std::sqrt(Dot(t.q, t.q, d.key_dim) + 1e-6f));
    Scale(t.k, d.key_dim, 1.0f / std::sqrt(Dot(t.k, t.k, d.key_dim) + 1e-6f));
  }
  Scale(t.q, d.key_dim, d.heads().query_scale());
  t.kq = Dot(t.k, t.q, d.key_dim);
}

// delta and o from S^T k and S^T q.
HWY_INLINE void Emit(const Token& t, V sk, V sq, V v, V& delta, V& o) {
  const D d;
  const V decay = hn::Set(d, t.decay);
  delta = hn::Mul(hn::Set(d, t.beta), hn::NegMulAdd(decay, sk, v));
  o = hn::MulAdd(hn::Set(d, t.kq), delta, hn::Mul(decay, sq));
}

// ---- state [key_dim, value_dim]: vectors are columns ----

// kVectors vectors of columns from `column` on; of the last, kMasked, the first `count` lanes.
template <int kVectors, bool kMasked>
HWY_INLINE void Columns(std::int64_t keys, std::int64_t stride, std::int64_t column,
                        std::int64_t count, float* HWY_RESTRICT state, Token& t) {
  const D d;
  const auto in = hn::FirstN(d, static_cast<std::size_t>(count));
  const auto load = [&](const float* p)
                        HWY_ATTR { return kMasked ? hn::MaskedLoad(in, d, p) : hn::LoadU(d, p); };
  V sk[kVectors], sq[kVectors], delta[kVectors];
  for (int c = 0; c < kVectors; ++c) sk[c] = sq[c] = hn::Zero(d);
  float* row = state + column;
  for (std::int64_t i = 0; i < keys; ++i, row += stride) {
    const V k = hn::Set(d, t.k[i]), q = hn::Set(d, t.q[i]);
    for (int c = 0; c < kVectors; ++c) {
      const V s = load(row + c * kLanes);
      sk[c] = hn::MulAdd(s, k, sk[c]);
      sq[c] = hn::MulAdd(s, q, sq[c]);
    }
  }
  for (int c = 0; c < kVectors; ++c) {
    const std::int64_t at = column + c * kLanes;
    V o;
    Emit(t, sk[c], sq[c], hn::Load(d, t.v + at), delta[c], o);
    hn::Store(o, d, t.o + at);
  }
  const V decay = hn::Set(d, t.decay);
  row = state + column;
  for (std::int64_t i = 0; i < keys; ++i, row += stride) {
    const V k = hn::Set(d, t.k[i]);
    for (int c = 0; c < kVectors; ++c) {
      const V s = hn::MulAdd(k, delta[c], hn::Mul(decay, load(row + c * kLanes)));
      if constexpr (kMasked) {
        hn::BlendedStore(s, in, d, row + c * kLanes);
      } else {
        hn::StoreU(s, d, row + c * kLanes);
      }
    }
  }
}

inline void KeyValueStep(std::int64_t keys, std::int64_t values, std::int64_t stride, float* state,
                         Token& t) {
  constexpr int kWide = HWY_TARGET == HWY_AVX2 ? 4 : 8;
  std::int64_t j = 0;
  for (; j + kWide * kLanes <= values; j += kWide * kLanes)
    Columns<kWide, false>(keys, stride, j, 0, state, t);
  for (; j < values; j += kLanes)
    Columns<1, true>(keys, stride, j, std::min(kLanes, values - j), state, t);
}

// ---- state [value_dim, key_dim]: a vector's worth of rows at a time ----

// Both dot products of a row, up to the tree inside the vector.
HWY_INLINE void RowDots(const float* HWY_RESTRICT row, const Token& t, std::int64_t keys, V& sk,
                        V& sq) {
  const D d;
  V k_sum[kDotParts], q_sum[kDotParts];
  for (int p = 0; p < kDotParts; ++p) k_sum[p] = q_sum[p] = hn::Zero(d);
  std::int64_t i = 0;
  for (; i + kDotLanes <= keys; i += kDotLanes) {
    for (int p = 0; p < kDotParts; ++p) {
      const std::int64_t at = i + p * kLanes;
      const V s = hn::LoadU(d, row + at);
      k_sum[p] = hn::MulAdd(s, hn::Load(d, t.k + at), k_sum[p]);
      q_sum[p] = hn::MulAdd(s, hn::Load(d, t.q + at), q_sum[p]);
    }
  }
  AddDot(row + i, t.k + i, keys - i, k_sum);
  AddDot(row + i, t.q + i, keys - i, q_sum);
  sk = JoinDot(k_sum);
  sq = JoinDot(q_sum);
}

// `next` is the state to come: its lines are fetched into L2 while this one's are written. (The
// other layout reads a state from end to end, which the hardware does better alone.)
inline void ValueKeyStep(std::int64_t keys, std::int64_t values, std::int64_t stride, float* state,
                         const float* next, Token& t) {
  const D d;
  for (std::int64_t j = 0; j < values; j += kLanes) {
    const std::int64_t count = std::min(kLanes, values - j);
    V sk[kLanes], sq[kLanes];
    for (std::int64_t r = 0; r < kLanes; ++r) {
      if (r < count) {
        RowDots(state + (j + r) * stride, t, keys, sk[r], sq[r]);
      } else {
        sk[r] = sq[r] = hn::Zero(d);
      }
    }
    V delta, o;
    Emit(t, LaneTrees(d, sk), LaneTrees(d, sq), hn::Load(d, t.v + j), delta, o);
    hn::Store(delta, d, t.delta + j);
    hn::Store(o, d, t.o + j);
    const V decay = hn::Set(d, t.decay);
    for (std::int64_t r = 0; r < count; ++r) {
      const V row_delta = hn::Set(d, t.delta[j + r]);
      float* row = state + (j + r) * stride;
      const float* ahead = next + (j + r) * stride;
      for (std::int64_t i = 0; i < keys; i += kLanes) {
        __builtin_prefetch(ahead + i, 0, 2);
        const V k = hn::Load(d, t.k + i);
        if (i + kLanes <= keys) {
          const V s = hn::MulAdd(k, row_delta, hn::Mul(decay, hn::LoadU(d, row + i)));
          hn::StoreU(s, d, row + i);
        } else {
          const auto in = hn::FirstN(d, static_cast<std::size_t>(keys - i));
          const V s = hn::MulAdd(k, row_delta, hn::Mul(decay, hn::MaskedLoad(in, d, row + i)));
          hn::BlendedStore(s, in, d, row + i);
        }
      }
    }
  }
}

// One token: delta and o of `t`, and the state. `next` is the state that comes after it.
inline void Step(const GdnStepDesc& d, std::int64_t stride, float* state, const float* next,
                 Token& t) {
  if (d.state_layout == StateLayout::key_value) {
    KeyValueStep(d.key_dim, d.value_dim, stride, state, t);
  } else {
    ValueKeyStep(d.key_dim, d.value_dim, stride, state, next, t);
  }
}

// A head's state to its snapshot, in one piece where the state's rows follow one another, as they
// do in the snapshot.
inline void StoreSnapshot(const GdnStepDesc& d, std::int64_t stride, const float* state, float* to,
                          bool stream) {
  const std::int64_t row = d.state_layout == StateLayout::key_value ? d.value_dim : d.key_dim;
  const std::int64_t all = d.key_dim * d.value_dim, piece = stride == row ? all : row;
  for (std::int64_t at = 0; at < all; at += piece)
    EmitLines(state + at / row * stride, static_cast<std::size_t>(piece) * sizeof(float), to + at,
              stream);
}

}  // namespace gdn_step
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif
#endif
