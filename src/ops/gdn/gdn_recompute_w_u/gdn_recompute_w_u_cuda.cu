// Two kernels: `cuda` gives the bits of `ref` (recompute_exact.cuh); `cuda_mma` gives the sums to
// the tensor cores, by warpgroups where they fit (recompute_warpgroup.cuh), by warps elsewhere
// (recompute_mma.cuh).
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

Status supports_mma(const Op::Desc& d) {
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

Status run_on_tensor_cores(const Op::Desc& d, const Op::Args& a, Stream stream,
                           Workspace workspace) {
  // Rows are whole pieces; where the first one starts is the caller's choice.
  for (const void* data : {a.k.data, a.v.data, a.a.data, static_cast<const void*>(a.w.data),
                           static_cast<const void*>(a.u.data)})
    if (reinterpret_cast<std::uintptr_t>(data) % kPiece != 0) return run(d, a, stream, workspace);
  return visit<float, bf16>(d.a_element, [&]<class M>(Type<M>) {
    if (fits_warpgroup(d, a)) return run_warpgroup<M>(d, a, stream);
    return visit<f16, bf16>(d.element,
                            [&]<class X>(Type<X>) { return run_mma<X, M>(d, a, stream); });
  });
}

PrecisionGuarantee mma_guarantee(const Op::Desc& d) {
  PrecisionGuarantee guarantee = Op::contract(d);
  guarantee.same_bits_on_all_backends = false;
  return guarantee;
}

constexpr Kernel<Op> kKernels[] = {{.name = "cuda_mma",
                                    .backend = "cuda",
                                    .weaker = mma_guarantee,
                                    .supports = supports_mma,
                                    .architecture = cuda::architecture,
                                    .run = run_on_tensor_cores},
                                   cuda::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<GdnRecomputeWU>> gdn_recompute_w_u_cuda() { return kKernels; }

}  // namespace bittern
