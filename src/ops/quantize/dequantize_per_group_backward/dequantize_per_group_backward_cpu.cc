#include "bittern/ops/dequantize_per_group_backward.h"
#include "core/numerics.h"
#include "cpu/kernel.h"
#include "ops/quantize/group_sum.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE \
  "ops/quantize/dequantize_per_group_backward/dequantize_per_group_backward_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "ops/quantize/group_sum-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = DequantizePerGroupBackward;

template <class T, class Q>
struct Body {
  using X = T;
  using B = Q;
  using F = Math<X>;
  static constexpr int kSums = 1;

  template <class Source>
  HWY_INLINE void operator()(const Source& source, std::int64_t n, X* d_q, F* terms, const X* d_y,
                             const Q* q) const {
    const hn::ScalableTag<F> d;
    for (std::int64_t i = 0; i < n; i += kLanes<F>) {
      const auto& p = source.At(i);
      const auto v = LoadMath(d, d_y + i);
      StoreMath(d, hn::Mul(v, p.scale), d_q + i);
      hn::StoreU(hn::Mul(v, hn::Sub(LoadCodes(d, q + i), p.zero)), d, terms + i);
    }
  }

  void Exact(F s, std::int32_t zero, X& d_q, F* terms, X d_y, Q q) const {
    d_q = from_math<X>(to_math(d_y) * s);
    *terms = scaled(std::int64_t{q} - zero, to_math(d_y));
  }
};

void RunBackward(const Op::Desc& d, const Op::Args& a, const cpu::SumPlan& plan, std::int64_t begin,
                 std::int64_t end, void* partial) {
  const ParamTensors t{a.scale.data, d.scale_element(), a.zero_point.as<std::int32_t>(), 0, 0};
  (void)visit_float(d.element, [&]<class X>(Type<X>) {
    return visit<std::int8_t, std::uint8_t>(d.code, [&]<class Q>(Type<Q>) {
      const Body<X, Q> body;
      GroupSums<Body<X, Q>> sums(plan, t, body, Rows<X>(a.d_q), Rows<const X>(a.d_y),
                                 Rows<const Q>(a.q), {a.d_scale.data});
      sums.Run(begin, end, static_cast<Math<X>*>(partial));
      return Status();
    });
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

using Op = DequantizePerGroupBackward;
BITTERN_EXPORT(RunBackward);

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  const GroupGeometry g = d.geometry();
  const bool dense =
      cpu::dense_rows(g, a.d_y) && cpu::dense_rows(g, a.q) && cpu::dense_rows(g, a.d_q);
  cpu::run_sums<Op>(cpu::SumPlan(g, dense, 1), BITTERN_CALL(RunBackward), d, a);
  return {};
}

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<Op>> dequantize_per_group_backward_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
