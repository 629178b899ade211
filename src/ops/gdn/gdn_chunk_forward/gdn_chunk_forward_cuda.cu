// Two kernels: `cuda` gives the bits of `ref` (chunk_exact.cuh); `cuda_wgmma` gives its products to
// the tensor cores, by warpgroups (sm_90a; chunk_prepare.cuh, chunk_warpgroup.cuh).
#include <string>

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
  if (d.element != DType::bf16 && d.element != DType::f16)
    return unsupported(std::string("element: ") + name(d.element) + ", expected bf16 or f16");
  const auto refuse = [](const char* field, std::int64_t value, std::int64_t expected) {
    return unsupported(std::string(field) + ": " + std::to_string(value) + ", expected " +
                       std::to_string(expected));
  };
  if (d.chunk != kMostRows) return refuse("chunk", d.chunk, kMostRows);
  if (d.key_dim != kWide) return refuse("key_dim", d.key_dim, kWide);
  if (d.value_dim != kWide) return refuse("value_dim", d.value_dim, kWide);
  // Each has a block of its own, which no loop goes on with.
  constexpr std::int64_t kMostBlocks = 0x7fffffff;
  const std::int64_t chunks = d.batch * d.state_chunks(), sequences = 2 * d.sequence_count();
  if (std::max(chunks, sequences) > kMostBlocks / d.value_heads)
    return unsupported("chunks and value heads: more than 2^31 - 1, expected fewer");
  return cuda::needs_warpgroups(device);
}

// Rows are copied in pieces; where they start is the caller's choice.
Status accepts_pieces(const Op::Desc&, const Op::Args& a) {
  const auto check = [](const char* operand, const auto& view) -> Status {
    BITTERN_TRY(cuda::starts_aligned(operand, view.data));
    for (int axis = 0; axis < 3; ++axis) {
      if (view.shape[axis] > 1 && view.stride[axis] % 8 != 0)
        return unsupported(std::string(operand) + ": stride " + std::to_string(view.stride[axis]) +
                           ", expected a multiple of 8");
    }
    return {};
  };
  BITTERN_TRY(check("q", a.q));
  BITTERN_TRY(check("k", a.k));
  BITTERN_TRY(check("v", a.v));
  return check("o", a.o);
}

std::size_t wgmma_workspace(const Op::Desc& d, Device device) {
  return ChainPlaces(d, segment_count(d, device.index)).bytes();
}

Status run_by_warpgroups(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace workspace) {
  return visit<f16, bf16>(
      d.element, [&]<class X>(Type<X>) { return run_warpgroups<X>(d, a, stream, workspace); });
}

// Rounding one factor of a product to bf16 changes it by 2^-8 (to f16 by 2^-11), both by 2^-7 and
// 2^-16. The rest is for decays within 2^-16 and the sums of both sides, of at most 256 + 64 terms.
PrecisionGuarantee wgmma_guarantee(const Op::Desc& d) {
  return {.math_precision = d.element,
          .accumulator = DType::f32,
          .same_bits_on_all_backends = false,
          .error_norm = ErrorNorm::terms,
          .error_bound = kGdnInverseBound};
}

constexpr Kernel<Op> kKernels[] = {{.name = "cuda_wgmma",
                                    .backend = "cuda",
                                    .weaker = wgmma_guarantee,
                                    .supports = supports_wgmma,
                                    .workspace = wgmma_workspace,
                                    .accepts = accepts_pieces,
                                    .architecture = cuda::architecture,
                                    .run = run_by_warpgroups},
                                   cuda::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<GdnChunkForward>> gdn_chunk_forward_cuda() { return kKernels; }

}  // namespace bittern
