#include "core/numerics.h"
#include "cpu/dispatch.h"
#include "cpu/parallel.h"
#include "plan/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/fake_quantize_per_group/fake_quantize_per_group_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "cpu/quantize-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = FakeQuantizePerGroup;

template <class X>
struct Body {
  using F = Math<X>;
  const Op::Desc& desc;

  void Prepare(const RunParams<F>&, std::int64_t) const {}

  template <class Source>
  HWY_INLINE void operator()(const Source& source, std::int64_t n, X* y, const X* x) const {
    const hn::ScalableTag<F> d;
    for (std::int64_t i = 0; i < n; i += kLanes<F>) {
      const auto p = source.At(i);
      const auto z = hn::Clamp(Quotient(d, LoadMath(d, x + i), p.scale), p.lo, p.hi);
      // A code's difference has no sign of zero: + 0 turns -0 into 0.
      StoreMath(d, hn::Mul(hn::Add(hn::Round(z), hn::Zero(d)), p.scale), y + i);
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
    Body<X> body{d};
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

Status supports(const Op::Desc&) { return cpu::supported(); }

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  const GroupGeometry g = d.geometry();
  cpu::parallel(
      g.rows * g.row_length, cpu::kGrain,
      [&](std::int64_t begin, std::int64_t end) {
        BITTERN_CALL(RunFakeQuantizePerGroup)(d, a, begin, end);
      },
      64);
  return {};
}

constexpr Kernel<Op> kKernels[] = {{.name = "cpu",
                                    .backend = "cpu",
                                    .supports = supports,
                                    .architecture = cpu::architecture,
                                    .run = run}};

}  // namespace

std::span<const Kernel<FakeQuantizePerGroup>> fake_quantize_per_group_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
