// Three kernels: `cuda` gives the bits of `ref` (recompute_exact.cuh); the others give the sums to
// the tensor cores, `cuda_wgmma` by warpgroups (sm_90a, recompute_warpgroup.cuh), `cuda_mma` by
// warps (recompute_mma.cuh).
#include <string>

#include "ops/gdn/gdn_recompute_w_u/recompute_exact.cuh"
#include "ops/gdn/gdn_recompute_w_u/recompute_mma.cuh"
#include "ops/gdn/gdn_recompute_w_u/recompute_warpgroup.cuh"
#include "plan/kernel.h"

namespace bittern {
namespace {

using namespace recompute;

Status run(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace) {
  return visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    return visit<float, bf16>(d.a_element,
                              [&]<class M>(Type<M>) { return run_exact<X, M>(d, a, stream); });
  });
}

Status supports_mma(const Op::Desc& d, Device) {
  if (d.element != DType::bf16 && d.element != DType::f16)
    return unsupported(std::string("element: ") + name(d.element) + ", expected bf16 or f16");
  const auto refuse = [](const char* field, std::int64_t value) {
    return unsupported(std::string(field) + ": " + std::to_string(value) +
                       ", expected a multiple of 16");
  };
  if (d.key_dim % 16 != 0) return refuse("key_dim", d.key_dim);
  if (d.value_dim % 16 != 0) return refuse("value_dim", d.value_dim);
  return {};
}

Status supports_wgmma(const Op::Desc& d, Device device) {
  if (d.element != DType::bf16)
    return unsupported(std::string("element: ") + name(d.element) + ", expected bf16");
  const auto refuse = [](const char* field, std::int64_t value, std::int64_t expected) {
    return unsupported(std::string(field) + ": " + std::to_string(value) + ", expected " +
                       std::to_string(expected));
  };
  if (d.chunk != kMostRows) return refuse("chunk", d.chunk, kMostRows);
  if (d.key_dim != kWide) return refuse("key_dim", d.key_dim, kWide);
  if (d.value_dim != kWide) return refuse("value_dim", d.value_dim, kWide);
  // Each has a block of its own, which no loop goes on with.
  if (const std::int64_t chunks = d.batch * d.state_chunks(); chunks > 0x7fffffff / d.value_heads)
    return unsupported("chunks and value heads: more than 2^31 - 1, expected fewer");
  return cuda::needs_warpgroups(device);
}

// Rows are whole pieces; where the first one starts is the caller's choice.
Status accepts_pieces(const Op::Desc&, const Op::Args& a) {
  BITTERN_TRY(cuda::starts_aligned("k", a.k.data));
  BITTERN_TRY(cuda::starts_aligned("v", a.v.data));
  BITTERN_TRY(cuda::starts_aligned("a", a.a.data));
  BITTERN_TRY(cuda::starts_aligned("w", a.w.data));
  return cuda::starts_aligned("u", a.u.data);
}

Status run_by_warps(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace) {
  return visit<f16, bf16>(d.element, [&]<class X>(Type<X>) {
    return visit<float, bf16>(d.a_element,
                              [&]<class M>(Type<M>) { return run_mma<X, M>(d, a, stream); });
  });
}

Status run_by_warpgroups(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace) {
  return visit<float, bf16>(d.a_element,
                            [&]<class M>(Type<M>) { return run_warpgroup<M>(d, a, stream); });
}

// Of `chunk` terms, the definition's fma chain is within chunk * 2^-24 of the sum of magnitudes,
// and the tensor cores (recompute_mma.cuh) within 0.82 chunk * 2^-24.
PrecisionGuarantee mma_guarantee(const Op::Desc& d) {
  return cuda::within_terms(Op::contract(d), 2 * d.chunk * 0x1p-24);
}

constexpr Kernel<Op> kKernels[] = {{.name = "cuda_wgmma",
                                    .backend = "cuda",
                                    .weaker = mma_guarantee,
                                    .supports = supports_wgmma,
                                    .accepts = accepts_pieces,
                                    .architecture = cuda::architecture,
                                    .run = run_by_warpgroups},
                                   {.name = "cuda_mma",
                                    .backend = "cuda",
                                    .weaker = mma_guarantee,
                                    .supports = supports_mma,
                                    .accepts = accepts_pieces,
                                    .architecture = cuda::architecture,
                                    .run = run_by_warps},
                                   cuda::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<GdnRecomputeWU>> gdn_recompute_w_u_cuda() { return kKernels; }

}  // namespace bittern
