// Two kernels: `cuda` gives the bits of `ref` (state_exact.cuh); `cuda_wgmma` gives its products to
// the tensor cores, by warpgroups (sm_90a; state_warpgroup.cuh).
#include "ops/gdn/gdn_state/state_exact.cuh"
#include "ops/gdn/gdn_state/state_warpgroup.cuh"
#include "plan/kernel.h"

namespace bittern {
namespace {

using state::Op;

Status run(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace) {
  return visit<float, f16, bf16>(
      d.element, [&]<class X>(Type<X>) { return state::run_exact<X>(d, a, stream); });
}

Status supports_wgmma(const Op::Desc& d, Device device) {
  constexpr std::int64_t kMostTokens = 0x7fffffff;
  const std::int64_t tokens = d.batch * d.tokens;
  if (tokens > kMostTokens)
    return chunk_forward::refused("batch * tokens", tokens,
                                  "at most " + std::to_string(kMostTokens));
  return chunk_forward::supports_warpgroups(d, device, d.value_dim / state::kGroupValues);
}

// Rows are copied in pieces of 16 bytes.
Status accepts_pieces(const Op::Desc&, const Op::Args& a) {
  BITTERN_TRY(cuda::starts_aligned("k", a.k.data));
  BITTERN_TRY(cuda::starts_aligned("w", a.w.data));
  BITTERN_TRY(cuda::starts_aligned("u", a.u.data));
  BITTERN_TRY(cuda::starts_aligned("h", a.h.data));
  return cuda::starts_aligned("v_new", a.v_new.data);
}

Status run_by_warpgroups(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace) {
  return visit<f16, bf16>(d.element,
                          [&]<class X>(Type<X>) { return state::run_warpgroup<X>(d, a, stream); });
}

// S and z are rounded on either side: 2^-9 of themselves for bf16, 2^-12 for f16. The rest is for
// sums of 128 and of 64 terms on both sides (docs/numerics.md), and decays within 2^-16.
PrecisionGuarantee wgmma_guarantee(const Op::Desc& d) {
  return cuda::within_terms(Op::contract(d),
                            (d.element == DType::f16 ? 0x1p-11 : 0x1p-8) + 0x1p-11);
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

std::span<const Kernel<GdnState>> gdn_state_cuda() { return kKernels; }

}  // namespace bittern
