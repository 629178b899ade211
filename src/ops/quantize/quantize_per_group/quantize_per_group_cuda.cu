#include "bittern/ops/quantize_per_group.h"
#include "ops/quantize/quantize.cuh"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = QuantizePerGroup;

Status run(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace) {
  return visit_float(d.element, [&]<class X>(Type<X>) {
    const cuda::QuantizeBody<X> body{cuda::Params(d, a.scale, a.zero_point),
                                     cuda::Rows<const X>(a.x), cuda::Rows<std::uint8_t>(a.q)};
    return cuda::run_elements(Op::kName, d, body, a.q.device.index, stream);
  });
}

constexpr Kernel<Op> kKernels[] = {cuda::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<Op>> quantize_per_group_cuda() { return kKernels; }

}  // namespace bittern
