#include "bittern/ops/dequantize_per_group.h"
#include "core/numerics.h"
#include "cpu/kernel.h"
#include "ops/quantize/run_elements.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/quantize/dequantize_per_group/dequantize_per_group_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "ops/quantize/tiles-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = DequantizePerGroup;

template <class X, class Q>
struct Body {
  using F = Math<X>;
  static constexpr bool kWholeLines = sizeof(X) >= 4;

  void Prepare(const RunParams<F>&, std::int64_t) const {}

  template <class Source, class To>
  HWY_INLINE void operator()(const Source& source, std::int64_t n, To y, const Q* q) const {
    const hn::ScalableTag<F> d;
    for (std::int64_t i = 0; i < n; i += kLanes<F>) {
      const auto& p = source.At(i);
      StoreMath(d, hn::Mul(hn::Sub(LoadCodes(d, q + i), p.zero), p.scale), y + i);
    }
  }

  X Exact(F s, std::int32_t zero, Q q) const {
    return from_math<X>(scaled(std::int64_t{q} - zero, s));
  }
};

void RunDequantizePerGroup(const Op::Desc& d, const Op::Args& a, std::int64_t begin,
                           std::int64_t end) {
  const ParamTensors t{a.scale.data, d.scale_element(), a.zero_point.as<std::int32_t>(), 0, 0};
  (void)visit_float(d.element, [&]<class X>(Type<X>) {
    return visit<std::int8_t, std::uint8_t>(d.code, [&]<class Q>(Type<Q>) {
      Body<X, Q> body;
      ForEachTile<Math<X>>(d.geometry(), t, begin, end, body, Rows<X>(a.y), Rows<const Q>(a.q));
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

using Op = DequantizePerGroup;
BITTERN_EXPORT(RunDequantizePerGroup);

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  return cpu::run_elements(d, a, BITTERN_CALL(RunDequantizePerGroup));
}

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<DequantizePerGroup>> dequantize_per_group_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
