#include "bittern/ops/dynamic_quantize.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"
#include "ops/quantize/dynamic.h"
#include "ops/quantize/group_sum.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/quantize/dynamic_quantize/dynamic_quantize_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "ops/quantize/quantize-inl.h"
#include "ops/quantize/tiles-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = DynamicQuantize;

// 0 where x is not finite: every range holds 0.
template <class D, class X>
HWY_INLINE hn::Vec<D> LoadFinite(D d, const X* x) {
  const auto v = LoadMath(d, x);
  return hn::IfThenElseZero(hn::Lt(hn::Abs(v), hn::Inf(d)), v);
}

template <class X>
HWY_INLINE FiniteRange<Math<X>> RangeOf(const X* x, std::int64_t n) {
  using F = Math<X>;
  const hn::ScalableTag<F> d;
  constexpr std::int64_t kN = kLanes<F>;
  auto lo = hn::Zero(d), hi = lo, lo2 = lo, hi2 = lo;
  std::int64_t i = 0;
  for (; i + 2 * kN <= n; i += 2 * kN) {
    const auto a = LoadFinite(d, x + i), b = LoadFinite(d, x + i + kN);
    lo = hn::Min(lo, a);
    hi = hn::Max(hi, a);
    lo2 = hn::Min(lo2, b);
    hi2 = hn::Max(hi2, b);
  }
  for (; i + kN <= n; i += kN) {
    const auto a = LoadFinite(d, x + i);
    lo = hn::Min(lo, a);
    hi = hn::Max(hi, a);
  }
  FiniteRange<F> range{hn::GetLane(hn::MinOfLanes(d, hn::Min(lo, lo2))),
                       hn::GetLane(hn::MaxOfLanes(d, hn::Max(hi, hi2)))};
  for (; i < n; ++i) range.take(to_math(x[i]));
  return range;
}

// ranges[i] with x[i], for each i.
template <class X, class F>
HWY_INLINE void WidenEach(const X* x, std::int64_t n, F* lo, F* hi) {
  const hn::ScalableTag<F> d;
  constexpr std::int64_t kN = kLanes<F>;
  std::int64_t i = 0;
  for (; i + kN <= n; i += kN) {
    const auto v = LoadFinite(d, x + i);
    hn::StoreU(hn::Min(hn::LoadU(d, lo + i), v), d, lo + i);
    hn::StoreU(hn::Max(hn::LoadU(d, hi + i), v), d, hi + i);
  }
  for (; i < n; ++i) {
    FiniteRange<F> range{lo[i], hi[i]};
    range.take(to_math(x[i]));
    lo[i] = range.lo;
    hi[i] = range.hi;
  }
}

template <class S>
void StoreParam(const Op::Desc& d, const Op::Args& a, std::int64_t p, FiniteRange<Math<S>> range) {
  const S s = d.symmetric ? symmetric_scale<S>(range, d.q_max)
                          : asymmetric_scale<S>(range, d.q_min, d.q_max);
  a.scale.as<S>()[p] = s;
  if (d.symmetric) return;
  a.zero_point.as<std::int32_t>()[p] = zero_point_for(range.lo, to_math(s), d.q_min, d.q_max);
}

template <class X>
HWY_INLINE void StoreParamOf(const Op::Desc& d, const Op::Args& a, std::int64_t p,
                             FiniteRange<Math<X>> range) {
  if constexpr (sizeof(X) == 2) {
    if (d.f32_scale) return StoreParam<float>(d, a, p, range);
  }
  StoreParam<X>(d, a, p, range);
}

// Elements [begin, end), with the parameters that have been stored.
void Quantize(const Op::Desc& d, const Op::Args& a, std::int64_t begin, std::int64_t end) {
  const ParamTensors t{a.scale.data, d.scale_element(),
                       d.symmetric ? nullptr : a.zero_point.as<std::int32_t>(), d.q_min, d.q_max};
  (void)visit_float(d.element, [&]<class X>(Type<X>) {
    return visit<std::int8_t, std::uint8_t>(d.code, [&]<class Q>(Type<Q>) {
      QuantizeBody<X, Q> body(d);
      ForEachTile<Math<X>>(d.geometry(), t, begin, end, body, Rows<Q>(a.q), Rows<const X>(a.x));
      return Status();
    });
  });
}

// Parameters [begin, end), each of which has a run of its own: x is quantised while it is still in
// the cache.
void QuantizeRuns(const Op::Desc& d, const Op::Args& a, std::int64_t begin, std::int64_t end) {
  const GroupGeometry g = d.geometry();
  const std::int64_t most = std::max<std::int64_t>(1, 16384 / g.run);
  for (std::int64_t p = begin; p < end;) {
    const std::int64_t last = std::min(end, p + most);
    (void)visit_float(d.element, [&]<class X>(Type<X>) HWY_ATTR {
      const Rows<const X> x(a.x);
      for (std::int64_t k = p; k < last; ++k)
        StoreParamOf<X>(d, a, k, RangeOf(x.at(k / g.param_step, k % g.param_step * g.run), g.run));
      return Status();
    });
    Quantize(d, a, p * g.run, last * g.run);
    p = last;
  }
}

// Widens ranges by elements [begin, end): lo[p] lies at ranges[p], hi[p] at ranges[g.params + p].
void Widen(const Op::Desc& d, const Op::Args& a, const GroupGeometry& g, std::int64_t begin,
           std::int64_t end, void* ranges) {
  (void)visit_float(d.element, [&]<class X>(Type<X>) HWY_ATTR {
    auto* lo = static_cast<Math<X>*>(ranges);
    auto* hi = lo + g.params;
    const Rows<const X> x(a.x);
    while (begin < end) {
      const std::int64_t row = begin / g.row_length, j = begin % g.row_length;
      const std::int64_t p = g.param(row, j), left = std::min(end - begin, g.row_length - j);
      if (g.run == 1) {
        WidenEach(x.at(row, j), left, lo + p, hi + p);
        begin += left;
      } else {
        const std::int64_t n = std::min(left, g.run - j % g.run);
        const auto range = RangeOf(x.at(row, j), n);
        lo[p] = std::min(lo[p], range.lo);
        hi[p] = std::max(hi[p], range.hi);
        begin += n;
      }
    }
    return Status();
  });
}

// Joins `parts` tables of ranges, and stores the parameters.
void StoreParams(const Op::Desc& d, const Op::Args& a, std::int64_t params, std::int64_t parts,
                 const void* ranges) {
  (void)visit_float(d.element, [&]<class X>(Type<X>) {
    for (std::int64_t p = 0; p < params; ++p) {
      FiniteRange<Math<X>> range;
      for (std::int64_t part = 0; part < parts; ++part) {
        const auto* lo = static_cast<const Math<X>*>(ranges) + 2 * part * params;
        range.lo = std::min(range.lo, lo[p]);
        range.hi = std::max(range.hi, lo[params + p]);
      }
      StoreParamOf<X>(d, a, p, range);
    }
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

using Op = DynamicQuantize;
BITTERN_EXPORT(Quantize);
BITTERN_EXPORT(QuantizeRuns);
BITTERN_EXPORT(Widen);
BITTERN_EXPORT(StoreParams);

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  const GroupGeometry g = d.geometry();
  const std::int64_t elements = g.rows * g.row_length;
  const std::int64_t grain = cpu::grain_ignored() ? 1 : cpu::kGrain;
  // Where there are runs enough to keep the threads busy, one pass over memory.
  if (g.param_step != 0 && elements != 0 && (g.params >= num_threads() || g.run <= grain)) {
    cpu::parallel(g.params, grain / g.run, [&](std::int64_t begin, std::int64_t end) {
      BITTERN_CALL(QuantizeRuns)(d, a, begin, end);
    });
    return {};
  }
  const std::int64_t parts = std::clamp<std::int64_t>(elements / grain, 1, num_threads());
  const std::int64_t table = 2 * g.params * (d.element == DType::f64 ? 2 : 1);
  std::vector<float> ranges(static_cast<std::size_t>(parts * table));  // or half as many f64
  const GroupGeometry rows = cpu::dense_rows(g, a.x) ? cpu::join_rows(g) : g;
  cpu::parallel(parts, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t part = begin; part < end; ++part)
      BITTERN_CALL(Widen)(d, a, rows, elements / parts * part + elements % parts * part / parts,
                          elements / parts * (part + 1) + elements % parts * (part + 1) / parts,
                          ranges.data() + part * table);
  });
  BITTERN_CALL(StoreParams)(d, a, g.params, parts, ranges.data());
  cpu::parallel(
      elements, cpu::kGrain,
      [&](std::int64_t begin, std::int64_t end) { BITTERN_CALL(Quantize)(d, a, begin, end); }, 64);
  return {};
}

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<Op>> dynamic_quantize_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
