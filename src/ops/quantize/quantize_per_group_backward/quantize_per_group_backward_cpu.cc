#include "bittern/ops/quantize_per_group_backward.h"
#include "core/numerics.h"
#include "cpu/kernel.h"
#include "ops/quantize/run_elements.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE \
  "ops/quantize/quantize_per_group_backward/quantize_per_group_backward_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "ops/quantize/tiles-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = QuantizePerGroupBackward;

// The largest x >= 0 with R(x / s) <= bound, for finite s > 0 and an integer bound >= 0: the tie
// above `bound` is within two steps of it. `found` is false where that did not bracket it.
template <class D>
HWY_INLINE hn::Vec<D> LargestInside(D d, hn::Vec<D> s, hn::Vec<D> bound, hn::Mask<D>& found) {
  using F = hn::TFromD<D>;
  const hn::RebindToSigned<D> di;
  constexpr int kSteps = 4;
  const auto tie = hn::Min(hn::Mul(hn::Add(bound, hn::Set(d, F(0.5))), s),
                           hn::Set(d, std::numeric_limits<F>::max()));
  const auto start = hn::Max(hn::Sub(hn::BitCast(di, tie), hn::Set(di, kSteps / 2)), hn::Zero(di));
  auto largest = hn::BitCast(d, start);
  const auto inside = [&](hn::Vec<D> x)
                          HWY_ATTR { return hn::Le(hn::Round(hn::Div(x, s)), bound); };
  found = inside(largest);
  for (int k = 1; k <= kSteps; ++k) {
    const auto x = hn::BitCast(d, hn::Add(start, hn::Set(di, k)));
    const auto still = inside(x);
    if (k == kSteps) found = hn::AndNot(still, found);
    largest = hn::IfThenElse(still, x, largest);
  }
  return largest;
}

template <class X>
struct Body {
  using F = Math<X>;
  using D = hn::ScalableTag<F>;
  static constexpr bool kWholeLines = !std::is_same_v<X, f16>;
  const Op::Desc& desc;
  // R(x / s) + zp grows (or falls, s < 0) with x, so it is in range exactly where x_lo <= x <=
  // x_hi: two comparisons instead of a division.
  alignas(64) F x_lo[RunParams<F>::kSize];
  alignas(64) F x_hi[RunParams<F>::kSize];
  alignas(64) F by_interval[RunParams<F>::kSize];  // not 0: so for this run

  HWY_INLINE explicit Body(const Op::Desc& d) : desc(d) {}

  void Prepare(const RunParams<F>& p, std::int64_t runs) {
    const D d;
    const auto zero = hn::Zero(d);
    for (std::int64_t i = 0; i < runs; i += kLanes<F>) {
      const auto s = hn::Load(d, p.scale + i), lo = hn::Load(d, p.lo + i),
                 hi = hn::Load(d, p.hi + i);
      const auto size = hn::Abs(s);
      const auto falls = hn::Lt(s, zero);
      hn::Mask<D> found_hi, found_lo;
      const auto largest = LargestInside(d, size, hn::IfThenElse(falls, hn::Neg(lo), hi), found_hi);
      const auto smallest =
          hn::Neg(LargestInside(d, size, hn::IfThenElse(falls, hi, hn::Neg(lo)), found_lo));
      // NaN x counts as quotient 0, which must be in range to be "not outside the interval".
      const auto ordinary = hn::And(hn::And(hn::Gt(size, zero), hn::Lt(size, hn::Inf(d))),
                                    hn::And(hn::Le(lo, zero), hn::Ge(hi, zero)));
      hn::Store(largest, d, x_hi + i);
      hn::Store(smallest, d, x_lo + i);
      hn::Store(
          hn::IfThenElseZero(hn::And(ordinary, hn::And(found_hi, found_lo)), hn::Set(d, F(1))), d,
          by_interval + i);
    }
  }

  template <class Source, class To>
  HWY_INLINE void operator()(const Source& source, std::int64_t n, To d_x, const X* d_y,
                             const X* x) const {
    const D d;
    if constexpr (std::is_same_v<Source, OneRun<D>>) {
      if (by_interval[source.k] != 0) return Interval(source, n, d_x, d_y, x);
    }
    for (std::int64_t i = 0; i < n; i += kLanes<F>) {
      const auto& p = source.At(i);
      const auto z = hn::Round(Quotient(d, LoadMath(d, x + i), p.scale));
      // Not Ne(scale, 0), which is false for NaN.
      const auto inside =
          hn::AndNot(hn::Eq(p.scale, hn::Zero(d)), hn::And(hn::Ge(z, p.lo), hn::Le(z, p.hi)));
      StoreMath(d, hn::IfThenElseZero(inside, hn::Div(LoadMath(d, d_y + i), p.scale)), d_x + i);
    }
  }

  template <class To>
  HWY_INLINE void Interval(const OneRun<D>& run, std::int64_t n, To d_x, const X* d_y,
                           const X* x) const {
    const D d;
    const auto lo = hn::Set(d, x_lo[run.k]), hi = hn::Set(d, x_hi[run.k]);
    const auto pass = [&](hn::Vec<D> d_y_i, hn::Vec<D> x_i) HWY_ATTR {
      return hn::IfThenZeroElse(hn::Or(hn::Lt(x_i, lo), hn::Gt(x_i, hi)),
                                hn::Div(d_y_i, run.v.scale));
    };
    std::int64_t i = 0;
    for (; i + 2 * kLanes<F> <= n; i += 2 * kLanes<F>) {
      PrefetchNext(d_y + i, 2 * kLanes<F>);
      PrefetchNext(x + i, 2 * kLanes<F>);
      const Two<D> u = LoadTwo(d, d_y + i), v = LoadTwo(d, x + i);
      StoreTwo(d, {pass(u.a, v.a), pass(u.b, v.b)}, d_x + i);
    }
    for (; i < n; i += kLanes<F>)
      StoreMath(d, pass(LoadMath(d, d_y + i), LoadMath(d, x + i)), d_x + i);
  }

  X Exact(F s, std::int32_t zero, X d_y, X x) const {
    const double code = unclamped_code(quotient<F>(to_math(x), s), zero);
    const bool passes = s != 0 && in_range(code, desc.q_min, desc.q_max);
    return from_math<X>(passes ? to_math(d_y) / s : F(0));
  }
};

void RunQuantizePerGroupBackward(const Op::Desc& d, const Op::Args& a, std::int64_t begin,
                                 std::int64_t end) {
  const ParamTensors t{a.scale.data, d.scale_element(), a.zero_point.as<std::int32_t>(), d.q_min,
                       d.q_max};
  (void)visit_float(d.element, [&]<class X>(Type<X>) {
    Body<X> body(d);
    ForEachTile<Math<X>>(d.geometry(), t, begin, end, body, Rows<X>(a.d_x), Rows<const X>(a.d_y),
                         Rows<const X>(a.x));
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

using Op = QuantizePerGroupBackward;
BITTERN_EXPORT(RunQuantizePerGroupBackward);

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  return cpu::run_elements(d, a, BITTERN_CALL(RunQuantizePerGroupBackward));
}

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<QuantizePerGroupBackward>> quantize_per_group_backward_cpu() {
  return kKernels;
}

}  // namespace bittern
#endif  // HWY_ONCE
