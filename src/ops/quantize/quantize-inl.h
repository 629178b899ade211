// Quantising with parameters that are there: the body (tiles-inl.h) of quantize_per_group, which
// dynamic_quantize takes too.
#if defined(BITTERN_OPS_QUANTIZE_QUANTIZE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_OPS_QUANTIZE_QUANTIZE_INL_H_
#undef BITTERN_OPS_QUANTIZE_QUANTIZE_INL_H_
#else
#define BITTERN_OPS_QUANTIZE_QUANTIZE_INL_H_
#endif

#include <type_traits>

#include "ops/quantize/params-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {

// q[0, n) = clamp(R(x / s) + zp, q_min, q_max), with parameters that are not far.
template <class Source, class To, class X>
HWY_INLINE void QuantizeRun(const Source& source, std::int64_t n, To q, const X* x) {
  using F = Math<X>;
  const hn::ScalableTag<F> d;
  constexpr std::int64_t kN = kLanes<F>;
  const auto codes = [&](std::int64_t i) HWY_ATTR {
    const auto& p = source.At(i);
    return CodeOf(d, hn::Clamp(Quotient(d, LoadMath(d, x + i), p.scale), p.lo, p.hi), p.zero);
  };
  std::int64_t i = 0;
  if constexpr (sizeof(F) == 4) {
    for (; i + 4 * kN <= n; i += 4 * kN) {
      PrefetchNext(x + i, 4 * kN);
      StoreCodes4<false>(codes(i), codes(i + kN), codes(i + 2 * kN), codes(i + 3 * kN), q + i);
    }
  }
  for (; i < n; i += kN) StoreCodes(hn::Rebind<std::int32_t, decltype(d)>(), codes(i), q + i);
}

// The same for half x and half scales, given Inverse's result, not 0.
template <class D, class To, class X>
HWY_INLINE void QuantizeHalfRun(const OneRun<D>& run, float inverse, std::int64_t n, To q,
                                const X* x) {
  constexpr std::int64_t kN = kLanes<float>;
  const D d;
  const auto& p = run.v;
  const auto r = hn::Set(d, inverse);
  std::int64_t i = 0;
  for (; i + 4 * kN <= n; i += 4 * kN) {
    PrefetchAhead(x + i, 4 * kN);
    const Two<D> x0 = LoadTwo(d, x + i), x1 = LoadTwo(d, x + i + 2 * kN);
    auto a = NearQuotient(x0.a, p.scale, r), b = NearQuotient(x0.b, p.scale, r);
    auto c = NearQuotient(x1.a, p.scale, r), e = NearQuotient(x1.b, p.scale, r);
    if (HWY_UNLIKELY(AnyNaN(d, hn::Add(a, b), hn::Add(c, e)))) {
      a = Quotient(d, x0.a, p.scale);
      b = Quotient(d, x0.b, p.scale);
      c = Quotient(d, x1.a, p.scale);
      e = Quotient(d, x1.b, p.scale);
    }
    const auto code = [&](hn::Vec<D> z)
                          HWY_ATTR { return CodeOf(d, hn::Clamp(z, p.lo, p.hi), p.zero); };
    StoreCodes4<std::is_same_v<X, bf16>>(code(a), code(b), code(c), code(e), q + i);
  }
  if (i < n) QuantizeRun(run, n - i, q + i, x + i);
}

// The body (see ForEachTile) of quantising with parameters that are there.
template <class X, class Q>
struct QuantizeBody {
  using F = Math<X>;
  using D = hn::ScalableTag<F>;
  static constexpr bool kWholeLines = sizeof(F) == 4;
  const QuantizeDesc& desc;
  alignas(64) F inverse[RunParams<F>::kSize];

  HWY_INLINE explicit QuantizeBody(const QuantizeDesc& d) : desc(d) {}

  void Prepare(const RunParams<F>& p, std::int64_t runs) {
    if constexpr (sizeof(X) == 2) SetInverses(p, runs, !desc.f32_scale, inverse);
  }

  template <class Source, class To>
  HWY_INLINE void operator()(const Source& source, std::int64_t n, To q, const X* x) const {
    if constexpr (sizeof(X) == 2 && std::is_same_v<Source, OneRun<D>>) {
      if (inverse[source.k] != 0) return QuantizeHalfRun(source, inverse[source.k], n, q, x);
    }
    QuantizeRun(source, n, q, x);
  }

  Q Exact(F s, std::int32_t zero, X x) const {
    return static_cast<Q>(quantize_code(quotient(to_math(x), s), zero, desc.q_min, desc.q_max));
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD
#endif
