#include "bittern/ops/fake_quantize_per_group.h"
#include "core/numerics.h"
#include "cpu/kernel.h"
#include "ops/quantize/run_elements.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/quantize/fake_quantize_per_group/fake_quantize_per_group_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "ops/quantize/tiles-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = FakeQuantizePerGroup;

template <class X>
struct Body {
  using F = Math<X>;
  using D = hn::ScalableTag<F>;
  static constexpr bool kWholeLines = !std::is_same_v<X, f16>;
  const Op::Desc& desc;
  alignas(64) F inverse[RunParams<F>::kSize];

  HWY_INLINE explicit Body(const Op::Desc& d) : desc(d) {}

  void Prepare(const RunParams<F>& p, std::int64_t runs) {
    if constexpr (sizeof(X) == 2) SetInverses(p, runs, !desc.f32_scale, inverse);
  }

  static HWY_INLINE hn::Vec<D> Result(hn::Vec<D> z, const ParamVectors<D>& p) {
    // A code's difference has no sign of zero: + 0 turns -0 into 0.
    const auto code = hn::Add(hn::Round(hn::Clamp(z, p.lo, p.hi)), hn::Zero(D()));
    return hn::Mul(code, p.scale);
  }

  template <class Source, class To>
  HWY_INLINE void operator()(const Source& source, std::int64_t n, To y, const X* x) const {
    const D d;
    std::int64_t i = 0;
    if constexpr (sizeof(X) == 2 && std::is_same_v<Source, OneRun<D>>) {
      if (inverse[source.k] != 0) {
        const auto r = hn::Set(d, inverse[source.k]);
        const ParamVectors<D>& p = source.v;
        for (; i + 2 * kLanes<F> <= n; i += 2 * kLanes<F>) {
          PrefetchNext(x + i, 2 * kLanes<F>);
          const Two<D> v = LoadTwo(d, x + i);
          auto a = NearQuotient(v.a, p.scale, r), b = NearQuotient(v.b, p.scale, r);
          if (HWY_UNLIKELY(AnyNaN(d, a, b))) {
            a = Quotient(d, v.a, p.scale);
            b = Quotient(d, v.b, p.scale);
          }
          StoreTwo(d, {Result(a, p), Result(b, p)}, y + i);
        }
      }
    }
    for (; i < n; i += kLanes<F>) {
      PrefetchNext(x + i, kLanes<F>);
      const auto& p = source.At(i);
      StoreMath(d, Result(Quotient(d, LoadMath(d, x + i), p.scale), p), y + i);
    }
  }

  X Exact(F s, std::int32_t zero, X x) const {
    const std::int32_t code =
        quantize_code(quotient<F>(to_math(x), s), zero, desc.q_min, desc.q_max);
    return from_math<X>(scaled(std::int64_t{code} - zero, s));
  }
};

void RunFakeQuantizePerGroup(const Op::Desc& d, const Op::Args& a, std::int64_t begin,
                             std::int64_t end) {
  const ParamTensors t{a.scale.data, d.scale_element(), a.zero_point.as<std::int32_t>(), d.q_min,
                       d.q_max};
  (void)visit_float(d.element, [&]<class X>(Type<X>) {
    Body<X> body(d);
    ForEachTile<Math<X>>(d.geometry(), t, begin, end, body, Rows<X>(a.y), Rows<const X>(a.x));
    return Status();
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD

#if HWY_ONCE
namespace bittern {
namespace {

using Op = FakeQuantizePerGroup;
BITTERN_EXPORT(RunFakeQuantizePerGroup);

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  return cpu::run_elements(d, a, BITTERN_CALL(RunFakeQuantizePerGroup));
}

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<FakeQuantizePerGroup>> fake_quantize_per_group_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
