// Two kernels: `cuda` gives the bits of `ref` (chunk_exact.cuh); `cuda_wgmma` gives its products to
// the tensor cores, by warpgroups (sm_90a; chunk_prepare.cuh, chunk_warpgroup.cuh).
#include "ops/gdn/gdn_chunk_forward/chunk_exact.cuh"
#include "ops/gdn/gdn_chunk_forward/chunk_warpgroup.cuh"
#include "plan/kernel.h"

namespace bittern {
namespace {

using namespace chunk_forward;

Status run(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace) {
  return visit<float, f16, bf16>(d.element,
                                 [&]<class X>(Type<X>) { return run_exact<X>(d, a, stream); });
}

Status supports_wgmma(const Op::Desc& d, Device device) {
  return supports_warpgroups(d, device, segment_rows(d) / kGroupValues);
}

// Rows are copied in pieces; where they start is the caller's choice.
Status accepts_pieces(const Op::Desc&, const Op::Args& a) {
  BITTERN_TRY(cuda::rows_aligned("q", a.q));
  BITTERN_TRY(cuda::rows_aligned("k", a.k));
  BITTERN_TRY(cuda::rows_aligned("v", a.v));
  return cuda::rows_aligned("o", as_const(a.o));
}

std::size_t wgmma_workspace(const Op::Desc& d, Device device) {
  return ChainPlaces(d, chain_segments(d, device.index)).bytes();
}

Status run_by_warpgroups(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace workspace) {
  return visit<f16, bf16>(d.element, [&]<class X>(Type<X>) {
    return with_key_dim(d, [&]<int kKeyDim>(std::integral_constant<int, kKeyDim>) {
      return run_warpgroups<X, kKeyDim>(d, a, stream, workspace);
    });
  });
}

constexpr Kernel<Op> kKernels[] = {{.name = "cuda_wgmma",
                                    .backend = "cuda",
                                    .weaker = warpgroup_guarantee,
                                    .supports = supports_wgmma,
                                    .workspace = wgmma_workspace,
                                    .accepts = accepts_pieces,
                                    .architecture = cuda::architecture,
                                    .run = run_by_warpgroups},
                                   cuda::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<GdnChunkForward>> gdn_chunk_forward_cuda() { return kKernels; }

}  // namespace bittern
