// The header's sums as they stand, fma by fma: the bits of `ref`, for every field of the op.
//
// Kernels in the order of their launches; each finds what it needs of the others in the workspace,
// in f32:
//
//   prepare     of each chunk and head: gates, k k^T, L and P
//   chains      from chunk to chunk: forwards S and y, and, in other blocks, backwards H and r
//   gradients   of each chunk and head: d_v, d_beta, dg in the place of d_g, and its dq and dk
//   sum_heads   of each chunk and key head: d_q and d_k
//   pass_gate   of each sequence and head: dg becomes d_g; its parts of d_a_log and d_dt_bias
//   sum_gates   of each head: d_a_log and d_dt_bias
#pragma once
#include "ops/gdn/gdn_chunk_backward/exact_chains.cuh"
#include "ops/gdn/gdn_chunk_backward/exact_chunks.cuh"

namespace bittern::chunk_backward::exact {

// ---- sums over heads ----

template <class X>
__global__ void __launch_bounds__(kThreads) sum_heads(const __grid_constant__ ExactProblem all) {
  const Op::Desc& d = all.p.d;
  const int keys = static_cast<int>(d.key_dim);
  const std::int64_t sharing = d.value_heads / d.key_heads, step = all.p.tiled ? d.key_heads : 1;
  for (std::int64_t index = blockIdx.x; index < all.slots.count * d.key_heads; index += gridDim.x) {
    const std::int64_t slot = all.key_heads.divide(index);
    const std::int64_t key_head = index - slot * all.key_heads.value();
    const Chunk c = all.chunk(slot, all.p.tiled ? key_head : key_head * sharing);
    const Gates& gates = *c.unit.gates;
    const Operands<X> of(all, c, gates);
    for (int first = 0; first < c.rows; first += kThreads / kSide) {
      const int row = first + thread() / kSide;
      const bool there = row < c.rows;
      const auto store = [&](const float* x, float factor, float inverse, auto&& raw, void* to,
                             const TokenStrides& stride) {
        const auto sum = [&](int i) {
          float acc = 0;
          for (std::int64_t n = 0; n < sharing; ++n)
            acc += x[n * step * all.layout.floats() + row * keys + i];
          return factor * acc;
        };
        const auto unit = [&](int i) { return raw(row, i) * inverse; };
        float along = 0;
        if (d.qk_l2norm) along = cuda::strided_dot(there ? keys : 0, sum, unit);
        if (!there) return;
        X* const out = static_cast<X*>(to) + stride.at(c.item.row, c.item.begin + row, key_head);
        for (int i = thread() % kSide; i < keys; i += kSide) {
          float x_i = gates.masked[row] != 0 ? 0.0f : sum(i);
          if (d.qk_l2norm && gates.masked[row] == 0) x_i = inverse * std::fma(-along, unit(i), x_i);
          out[i] = cuda::store_math<X>(x_i);
        }
      };
      const auto raw_query = [&](int r, int i) { return of.raw_query(r, i); };
      const auto raw_key = [&](int r, int i) { return of.raw_key(r, i); };
      store(c.unit.d_q, all.p.scale, there ? gates.q_inverse[row] : 1, raw_query, all.d_q,
            all.d_q_stride);
      store(c.unit.d_k, 1, there ? gates.k_inverse[row] : 1, raw_key, all.d_k, all.d_k_stride);
    }
  }
}

// ---- the gate ----

// A block has a sequence and head; its items are not cut into parts.
template <class = void>
__global__ void __launch_bounds__(kThreads) pass_gate(const __grid_constant__ ExactProblem all) {
  struct Term {
    float dg, log_decay, d_g;
    bool counts;
  };
  __shared__ Term terms[kThreads];
  const Problem& p = all.p;
  for (std::int64_t index = blockIdx.x; index < all.sequences * p.d.value_heads;
       index += gridDim.x) {
    const Problem::Item item = p.item(index * p.parts.value());
    const float a_log = p.a_log[item.head], bias = p.dt_bias[item.head];
    const float rate = -math::exp(a_log);
    GateSums sums{};
    for (std::int64_t begin = item.begin; begin < item.end; begin += kThreads) {
      const std::int64_t token = begin + thread();
      Term& term = terms[thread()];
      __syncthreads();
      term.counts = token < item.end && !p.masked(item, token);
      if (term.counts) {
        float& d_g = all.d_g[all.d_g_stride.at(item.row, token, item.head)];
        const float input = p.g[p.g_stride.at(item.row, token, item.head)];
        term.log_decay = gdn_log_decay(input, a_log, bias);
        term.counts = !(term.log_decay <= kGdnReset);
        if (term.counts) {
          term.dg = d_g;
          d_g = term.d_g = d_g * rate * gdn_softplus_slope(input + bias);
        }
      }
      __syncthreads();
      if (thread() != 0) continue;
      for (const Term& x : terms) {
        if (!x.counts) continue;
        sums.a_log = std::fma(x.dg, x.log_decay, sums.a_log);
        sums.dt_bias += x.d_g;
      }
    }
    if (thread() == 0) all.sums[index] = sums;
  }
}

template <class = void>
__global__ void __launch_bounds__(kThreads) sum_gates(const __grid_constant__ ExactProblem all) {
  const Op::Desc& d = all.p.d;
  const std::int64_t all_threads = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t head = std::int64_t{blockIdx.x} * kThreads + thread(); head < d.value_heads;
       head += all_threads) {
    GateSums total{};
    for (std::int64_t n = 0; d.gate && n < all.sequences; ++n) {
      total.a_log += all.sums[n * d.value_heads + head].a_log;
      total.dt_bias += all.sums[n * d.value_heads + head].dt_bias;
    }
    if (all.d_a_log != nullptr) all.d_a_log[head] = total.a_log;
    if (all.d_dt_bias != nullptr) all.d_dt_bias[head] = total.dt_bias;
  }
}

// ---- all of it ----

template <class X>
Status run(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace workspace) {
  const ExactProblem all(d, a, workspace.data);
  const auto launch = [&](auto* kernel, std::int64_t blocks, std::size_t shared = 0) {
    return cuda::launch(Op::kName, kernel,
                        {.blocks = blocks, .threads = kThreads, .shared = shared},
                        a.d_v.device.index, stream, all);
  };
  BITTERN_TRY(launch(prepare<X>, all.items, sizeof(PrepareShared)));
  BITTERN_TRY(launch(chains<X>, 2 * all.p.items, ChainShared::bytes(d.key_dim)));
  BITTERN_TRY(launch(gradients<X>, all.items, sizeof(GradientsShared)));
  BITTERN_TRY(launch(sum_heads<X>, all.slots.count * d.key_heads));
  if (d.gate) BITTERN_TRY(launch(pass_gate<>, all.sequences * d.value_heads));
  return launch(sum_gates<>, cuda::grid_for(d.value_heads, kThreads).blocks);
}

}  // namespace bittern::chunk_backward::exact
