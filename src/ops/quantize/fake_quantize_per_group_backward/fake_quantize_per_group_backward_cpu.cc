#include "bittern/ops/fake_quantize_per_group_backward.h"
#include "core/numerics.h"
#include "cpu/kernel.h"
#include "ops/quantize/group_sum.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE \
  "ops/quantize/fake_quantize_per_group_backward/fake_quantize_per_group_backward_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "ops/quantize/group_sum-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = FakeQuantizePerGroupBackward;

// d_x is d_y or 0: nothing to round.
template <class D, class X>
HWY_INLINE void StoreUnrounded(D d, hn::Vec<D> v, X* p) {
  if constexpr (std::is_same_v<X, bf16>) {
    const hn::Rebind<std::uint16_t, D> dh;
    const auto upper = hn::ShiftRight<16>(hn::BitCast(hn::RebindToUnsigned<D>(), v));
    hn::StoreU(hn::TruncateTo(dh, upper), dh, reinterpret_cast<std::uint16_t*>(p));
  } else {
    StoreMath(d, v, p);
  }
}

template <class T>
struct Body {
  using X = T;
  using B = T;
  using F = Math<X>;
  static constexpr int kSums = 2;
  const Op::Desc& desc;

  template <class Source>
  HWY_INLINE void operator()(const Source& source, std::int64_t n, X* d_x, F* terms, const X* d_y,
                             const X* x) const {
    const hn::ScalableTag<F> d;
    for (std::int64_t i = 0; i < n; i += kLanes<F>) {
      const auto& p = source.At(i);
      const auto v = LoadMath(d, d_y + i);
      const auto z = Quotient(d, LoadMath(d, x + i), p.scale);
      const auto r = hn::Round(z);
      // R(z) + zp against the code range; out of range, clamp(R(z)) + zp is the code.
      const auto inside = hn::And(hn::Ge(r, p.lo), hn::Le(r, p.hi));
      const auto factor = hn::IfThenElse(inside, hn::Sub(r, z), hn::Clamp(r, p.lo, p.hi));
      StoreUnrounded(d, hn::IfThenElseZero(inside, v), d_x + i);
      hn::StoreU(hn::Mul(v, factor), d, terms + i);
      hn::StoreU(hn::IfThenZeroElse(inside, hn::Neg(hn::Mul(p.scale, v))), d,
                 terms + kTermStride + i);
    }
  }

  void Exact(F s, std::int32_t zero, X& d_x, F* terms, X d_y, X x) const {
    const F v = to_math(d_y), z = quotient(to_math(x), s);
    const bool inside = in_range(unclamped_code(z, zero), desc.q_min, desc.q_max);
    const std::int64_t q = quantize_code(z, zero, desc.q_min, desc.q_max);
    d_x = inside ? d_y : from_math<X>(F(0));
    terms[0] = inside ? v * (std::nearbyint(z) - z) : scaled(q - zero, v);
    terms[kTermStride] = inside ? F(0) : -(s * v);
  }
};

void RunBackward(const Op::Desc& d, const Op::Args& a, const cpu::SumPlan& plan, std::int64_t begin,
                 std::int64_t end, void* partial) {
  const ParamTensors t{a.scale.data, d.scale_element(), a.zero_point.as<std::int32_t>(), d.q_min,
                       d.q_max};
  (void)visit_float(d.element, [&]<class X>(Type<X>) {
    const Body<X> body{d};
    GroupSums<Body<X>> sums(plan, t, body, Rows<X>(a.d_x), Rows<const X>(a.d_y), Rows<const X>(a.x),
                            {a.d_scale.data, a.d_zero_point.data});
    sums.Run(begin, end, static_cast<Math<X>*>(partial));
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

using Op = FakeQuantizePerGroupBackward;
BITTERN_EXPORT(RunBackward);

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  const GroupGeometry g = d.geometry();
  const bool dense =
      cpu::dense_rows(g, a.d_y) && cpu::dense_rows(g, a.x) && cpu::dense_rows(g, a.d_x);
  cpu::run_sums<Op>(cpu::SumPlan(g, dense, 2), BITTERN_CALL(RunBackward), d, a);
  return {};
}

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<Op>> fake_quantize_per_group_backward_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
