// Two kernels: `cuda` gives the bits of `ref` (output_exact.cuh); `cuda_wgmma` gives its products
// to the tensor cores, by warpgroups (sm_90a; output_warpgroup.cuh).
#include "ops/gdn/gdn_output/output_exact.cuh"
#include "ops/gdn/gdn_output/output_warpgroup.cuh"
#include "plan/kernel.h"

namespace bittern {
namespace {

using output::Op;

Status run(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace) {
  return visit<float, f16, bf16>(
      d.element, [&]<class X>(Type<X>) { return output::run_exact<X>(d, a, stream); });
}

Status supports_wgmma(const Op::Desc& d, Device device) {
  return chunk_forward::supports_warpgroups(d, device, 0);
}

// Rows are copied in pieces of 16 bytes.
Status accepts_pieces(const Op::Desc&, const Op::Args& a) {
  BITTERN_TRY(cuda::starts_aligned("q", a.q.data));
  BITTERN_TRY(cuda::starts_aligned("k", a.k.data));
  BITTERN_TRY(cuda::starts_aligned("v_new", a.v_new.data));
  BITTERN_TRY(cuda::starts_aligned("h", a.h.data));
  return cuda::starts_aligned("o", a.o.data);
}

Status run_by_warpgroups(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace) {
  return visit<f16, bf16>(d.element,
                          [&]<class X>(Type<X>) { return output::run_warpgroup<X>(d, a, stream); });
}

// p is rounded once on either side: 2^-9 of itself for bf16, 2^-12 for f16. The rest is for sums of
// 128 and of 192 terms on both sides (docs/numerics.md), and decays within 2^-16.
PrecisionGuarantee wgmma_guarantee(const Op::Desc& d) {
  return cuda::within_terms(Op::contract(d),
                            (d.element == DType::f16 ? 0x1p-11 : 0x1p-8) + 0x1p-13);
}

constexpr Kernel<Op> kKernels[] = {{.name = "cuda_wgmma",
                                    .backend = "cuda",
                                    .weaker = wgmma_guarantee,
                                    .supports = supports_wgmma,
                                    .accepts = accepts_pieces,
                                    .architecture = cuda::architecture,
                                    .run = run_by_warpgroups},
                                   cuda::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<GdnOutput>> gdn_output_cuda() { return kKernels; }

}  // namespace bittern
