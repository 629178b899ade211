#include "ops/aura/aura_attention/attend_exact.cuh"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = AuraAttention;

std::size_t workspace(const Op::Desc& d, Device device) {
  return attend::partials_bytes(d, device.index);
}

Status run(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace workspace) {
  const int device = a.out.device.index;
  const attend::Problem p = attend::problem(d, a);
  attend::Cut cut = attend::cut_of(d);
  if (attend::partials_bytes(d, device) != 0) cut.partials = static_cast<float*>(workspace.data);
  switch (attend::rows_at_once(d)) {
    case 1: return attend::run_exact<1>(p, cut, device, stream);
    case 4: return attend::run_exact<4>(p, cut, device, stream);
    case 8: return attend::run_exact<8>(p, cut, device, stream);
    default: return attend::run_exact<16>(p, cut, device, stream);
  }
}

constexpr Kernel<Op> kKernels[] = {cuda::exact_kernel<Op>(run, workspace)};

}  // namespace

std::span<const Kernel<AuraAttention>> aura_attention_cuda() { return kKernels; }

}  // namespace bittern
