// Two kernels: `cuda` gives the bits of `ref` (backward_exact.cuh); `cuda_wgmma` gives its products
// to the tensor cores, by warpgroups (sm_90a; backward_device.cuh).
#include "ops/gdn/gdn_chunk_backward/backward_chains.cuh"
#include "ops/gdn/gdn_chunk_backward/backward_chunks.cuh"
#include "ops/gdn/gdn_chunk_backward/backward_exact.cuh"
#include "ops/gdn/gdn_chunk_backward/backward_gates.cuh"
#include "plan/kernel.h"

namespace bittern {
namespace {

using namespace chunk_backward;
using chunk_backward::Op;

Status supports(const Op::Desc& d, Device device) {
  return supports_warpgroups(d, device, 2 * segment_rows(d) / kGroupValues);
}

// Rows are copied in pieces; where they start is the caller's choice.
Status accepts(const Op::Desc&, const Op::Args& a) {
  BITTERN_TRY(cuda::rows_aligned("d_o", a.d_o));
  BITTERN_TRY(cuda::rows_aligned("q", a.q));
  BITTERN_TRY(cuda::rows_aligned("k", a.k));
  BITTERN_TRY(cuda::rows_aligned("v", a.v));
  BITTERN_TRY(cuda::rows_aligned("d_q", as_const(a.d_q)));
  BITTERN_TRY(cuda::rows_aligned("d_k", as_const(a.d_k)));
  return cuda::rows_aligned("d_v", as_const(a.d_v));
}

int segments_of(const Op::Desc& d, int device) {
  return segment_count(d, device, 2 * segment_rows(d) / kGroupValues);
}

std::size_t workspace(const Op::Desc& d, Device device) {
  return workspace_bytes(d, segments_of(d, device.index));
}

template <class X, int kKeyDim>
Status run_backward(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace workspace) {
  const int device = a.d_v.device.index, segments = segments_of(d, device);
  const Places places = places_in(d, segments, workspace.data);
  const auto launch = [&](auto kernel, const cuda::Grid& grid, const auto& problem) {
    return cuda::launch(Op::kName, kernel, grid, device, stream, problem);
  };
  PrepareProblem prepare(d, forward_args(a), places.records);
  prepare.gates = places.gates;
  BITTERN_TRY(
      launch(chunk_prepare<X, kKeyDim>,
             {.blocks = prepare.items, .threads = kPrepareThreads, .shared = PrepareShared::kBytes},
             prepare));
  const auto run_chains = [&](auto kernel, const ChainsProblem& chains, std::int64_t blocks) {
    return launch(
        kernel,
        {.blocks = blocks, .threads = kChainThreads, .shared = ChainStage<true, kKeyDim>::kShared},
        chains);
  };
  if (segments > 1) {
    const ChainsProblem find(d, a, places, segments, segment_rows(d) / kGroupValues);
    BITTERN_TRY(run_chains(backward_chains<X, false, kKeyDim>, find, find.finding_blocks()));
    const BackwardJoinProblem join{Problem(d, forward_args(a), d.value_dim / kJoinValues), find.cut,
                                   places.gradients};
    BITTERN_TRY(launch(backward_join<kKeyDim>,
                       {.blocks = 2 * join.p.items,
                        .threads = JoinShared<kKeyDim>::kThreads,
                        .shared = sizeof(JoinShared<kKeyDim>)},
                       join));
  }
  const ChainsProblem chains(d, a, places, segments, d.value_dim / kGroupValues);
  BITTERN_TRY(run_chains(backward_chains<X, true, kKeyDim>, chains, chains.blocks()));
  const ChunksProblem chunks(d, a, places);
  const std::int64_t most = cuda::limits(device).multiprocessors;
  const bool whole = kKeyDim == kWide && d.value_dim == kSheetValues;
  BITTERN_TRY(launch(whole ? backward_chunks<X, true> : backward_chunks<X, false>,
                     {.blocks = std::min(chunks.items, most),
                      .threads = kChunkThreads,
                      .shared = ChunkShared::kBytes},
                     chunks));
  const GatesProblem gates(d, a, places);
  BITTERN_TRY(launch(places.sheets_each == 1 ? backward_gates<true> : backward_gates<false>,
                     cuda::grid_for(gates.items * 32, kGateThreads), gates));
  if (!a.d_a_log && !a.d_dt_bias) return {};
  return launch(backward_terms<>, {.blocks = d.value_heads, .threads = kGateThreads}, gates);
}

Status run(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace workspace) {
  return visit<f16, bf16>(d.element, [&]<class X>(Type<X>) {
    return with_key_dim(d, [&]<int kKeyDim>(std::integral_constant<int, kKeyDim>) {
      return run_backward<X, kKeyDim>(d, a, stream, workspace);
    });
  });
}

std::size_t exact_workspace(const Op::Desc& d, Device) { return exact::workspace_bytes(d); }

Status run_exact(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace workspace) {
  return visit<float, f16, bf16>(
      d.element, [&]<class X>(Type<X>) { return exact::run<X>(d, a, stream, workspace); });
}

constexpr Kernel<Op> kKernels[] = {{.name = "cuda_wgmma",
                                    .backend = "cuda",
                                    .weaker = warpgroup_guarantee,
                                    .supports = supports,
                                    .workspace = workspace,
                                    .accepts = accepts,
                                    .architecture = cuda::architecture,
                                    .run = run},
                                   cuda::exact_kernel<Op>(run_exact, exact_workspace)};

}  // namespace

std::span<const Kernel<GdnChunkBackward>> gdn_chunk_backward_cuda() { return kKernels; }

}  // namespace bittern
