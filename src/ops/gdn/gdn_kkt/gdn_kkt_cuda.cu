// Two kernels: `cuda` gives the bits of `ref` (kkt_exact.cuh); `cuda_mma` gives k k^T to the tensor
// cores (kkt_mma.cuh).
#include "ops/gdn/gdn_kkt/kkt_exact.cuh"
#include "ops/gdn/gdn_kkt/kkt_mma.cuh"
#include "plan/kernel.h"

namespace bittern {
namespace {

using kkt::Op;

Status run(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace) {
  return visit<float, f16, bf16>(d.element,
                                 [&]<class X>(Type<X>) { return kkt::run_exact<X>(d, a, stream); });
}

Status supports_mma(const Op::Desc& d, Device) { return chunk_forward::supports_tiles(d); }

// Keys are copied in pieces of 16 bytes, and L is written so.
Status accepts_pieces(const Op::Desc&, const Op::Args& a) {
  BITTERN_TRY(cuda::starts_aligned("k", a.k.data));
  return cuda::starts_aligned("l", a.l.data);
}

Status run_by_warps(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace) {
  return visit<f16, bf16>(d.element,
                          [&]<class X>(Type<X>) { return kkt::run_mma<X>(d, a, stream); });
}

// Of up to 128 terms, the definition's chain of fma is within 2^-17 of the sum of magnitudes, and
// tensor cores within 0.82 2^-17 (docs/numerics.md). Decays are within 2^-16 of themselves.
PrecisionGuarantee mma_guarantee(const Op::Desc& d) {
  return cuda::within_terms(Op::contract(d), 0x1p-15);
}

constexpr Kernel<Op> kKernels[] = {{.name = "cuda_mma",
                                    .backend = "cuda",
                                    .weaker = mma_guarantee,
                                    .supports = supports_mma,
                                    .accepts = accepts_pieces,
                                    .architecture = cuda::architecture,
                                    .run = run_by_warps},
                                   cuda::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<GdnKkt>> gdn_kkt_cuda() { return kKernels; }

}  // namespace bittern
