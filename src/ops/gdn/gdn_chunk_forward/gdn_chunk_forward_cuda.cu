#include "ops/gdn/gdn_chunk_forward/chunk_exact.cuh"
#include "plan/kernel.h"

namespace bittern {
namespace {

using namespace chunk_forward;

Status run(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace) {
  return visit<float, f16, bf16>(d.element,
                                 [&]<class X>(Type<X>) { return run_exact<X>(d, a, stream); });
}

constexpr Kernel<Op> kKernels[] = {cuda::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<GdnChunkForward>> gdn_chunk_forward_cuda() { return kKernels; }

}  // namespace bittern
