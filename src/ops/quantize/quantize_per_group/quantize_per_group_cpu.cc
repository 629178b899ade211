#include "bittern/ops/quantize_per_group.h"
#include "core/numerics.h"
#include "cpu/kernel.h"
#include "ops/quantize/run_elements.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/quantize/quantize_per_group/quantize_per_group_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "ops/quantize/quantize-inl.h"
#include "ops/quantize/tiles-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = QuantizePerGroup;

void RunQuantizePerGroup(const Op::Desc& d, const Op::Args& a, std::int64_t begin,
                         std::int64_t end) {
  const ParamTensors t{a.scale.data, d.scale_element(), a.zero_point.as<std::int32_t>(), d.q_min,
                       d.q_max};
  (void)visit_float(d.element, [&]<class X>(Type<X>) {
    return visit<std::int8_t, std::uint8_t>(d.code, [&]<class Q>(Type<Q>) {
      QuantizeBody<X, Q> body(d);
      ForEachTile<Math<X>>(d.geometry(), t, begin, end, body, Rows<Q>(a.q), Rows<const X>(a.x));
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

using Op = QuantizePerGroup;
BITTERN_EXPORT(RunQuantizePerGroup);

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  return cpu::run_elements(d, a, BITTERN_CALL(RunQuantizePerGroup));
}

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<QuantizePerGroup>> quantize_per_group_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
