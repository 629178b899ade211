// One kernel, cuda_wgmma: products on tensor cores, by warpgroups (sm_90a); see
// backward_device.cuh.
#include <string>

#include "ops/gdn/gdn_chunk_backward/backward_chains.cuh"
#include "ops/gdn/gdn_chunk_backward/backward_chunks.cuh"
#include "plan/kernel.h"

namespace bittern {
namespace {

using namespace chunk_backward;
using chunk_backward::Op;

Status supports(const Op::Desc& d, Device device) {
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
  const std::int64_t chunks = d.batch * d.state_chunks();
  const std::int64_t sequences = 2 * kParts * d.sequence_count();
  if (std::max(chunks, sequences) > kMostBlocks / d.value_heads)
    return unsupported("chunks and value heads: more than 2^31 - 1, expected fewer");
  return cuda::needs_warpgroups(device);
}

// Rows are copied in pieces; where they start is the caller's choice.
Status accepts(const Op::Desc&, const Op::Args& a) {
  const auto check = [](const char* operand, const auto& view) -> Status {
    BITTERN_TRY(cuda::starts_aligned(operand, view.data));
    for (int axis = 0; axis < 3; ++axis) {
      if (view.shape[axis] > 1 && view.stride[axis] % 8 != 0)
        return unsupported(std::string(operand) + ": stride " + std::to_string(view.stride[axis]) +
                           ", expected a multiple of 8");
    }
    return {};
  };
  BITTERN_TRY(check("d_o", a.d_o));
  BITTERN_TRY(check("q", a.q));
  BITTERN_TRY(check("k", a.k));
  BITTERN_TRY(check("v", a.v));
  BITTERN_TRY(check("d_q", a.d_q));
  BITTERN_TRY(check("d_k", a.d_k));
  return check("d_v", a.d_v);
}

std::size_t workspace(const Op::Desc& d, Device) { return workspace_bytes(d); }

Status run(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace workspace) {
  return visit<f16, bf16>(
      d.element, [&]<class X>(Type<X>) { return run_backward<X>(d, a, stream, workspace); });
}

PrecisionGuarantee guarantee(const Op::Desc& d) {
  return {.math_precision = d.element,
          .accumulator = DType::f32,
          .same_bits_on_all_backends = false,
          .error_norm = ErrorNorm::terms,
          .error_bound = kGdnInverseBound};
}

constexpr Kernel<Op> kKernels[] = {{.name = "cuda_wgmma",
                                    .backend = "cuda",
                                    .weaker = guarantee,
                                    .supports = supports,
                                    .workspace = workspace,
                                    .accepts = accepts,
                                    .architecture = cuda::architecture,
                                    .run = run}};

}  // namespace

std::span<const Kernel<GdnChunkBackward>> gdn_chunk_backward_cuda() { return kKernels; }

}  // namespace bittern
