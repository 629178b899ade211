// d_g and d_beta of every chunk and head, of the sums over its rows that backward_chunks.cuh has
// left, by a warp; then d_a_log and d_dt_bias.
#pragma once
#include "ops/gdn/gdn_chunk_backward/backward_device.cuh"

namespace bittern::chunk_backward {

constexpr int kGateThreads = 256;

struct GatesProblem {
  Problem p;
  cuda::ChunkSlots slots;
  float *d_g, *d_beta, *d_a_log, *d_dt_bias;  // the last two null: left out
  TokenStrides d_g_stride, d_beta_stride;
  Places places;
  std::int64_t items;

  GatesProblem(const Op::Desc& d, const Op::Args& a, const Places& in)
      : p(d, forward_args(a), 1),
        slots(d, a.cu_seqlens),
        d_g(a.d_g.as<float>()),
        d_beta(a.d_beta.as<float>()),
        d_a_log(a.d_a_log.as<float>()),
        d_dt_bias(a.d_dt_bias.as<float>()),
        d_g_stride(a.d_g),
        d_beta_stride(a.d_beta),
        places(in),
        items(chunks_and_heads(d)) {}
};

// Two rows a lane.
template <bool kOneSheet>
__global__ void __launch_bounds__(kGateThreads)
    backward_gates(const __grid_constant__ GatesProblem all) {
  const Problem& p = all.p;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t item = std::int64_t{blockIdx.x} * (kGateThreads / 32) + threadIdx.x / 32;
  if (item >= all.items) return;
  const std::int64_t slot = p.heads.divide(item), head = item - slot * p.heads.value();
  const cuda::ChunkTokens chunk = all.slots.at(slot);
  if (chunk.rows == 0) return;
  const ChunkGates& g = all.places.gates[item];
  const int sheets = kOneSheet ? 1 : all.places.sheets_each;
  const RowSums* const sums = all.places.sums + item * sheets;
  const RowSums& of_pairs = sums[sheets - 1];
  float own[2], gone[2], d_beta[2];  // terms of f and z
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int i = 2 * lane + e;
    const float decay = cuda::approximate_exp2(g.high[i] + g.low[i]);
    float k_m = 0, q_n = 0, k_z = 0, r_v = 0;
    for (int n = 0; n < sheets; ++n) {
      const RowSums& s = sums[n];
      k_m += s.k_m[0][i] + s.k_m[1][i];
      q_n += s.q_n[0][i] + s.q_n[1][i];
      k_z += s.k_z[0][i] + s.k_z[1][i];
      r_v += s.r_v[i];
    }
    own[e] = std::fma(-(g.beta[i] * decay), k_m, decay * q_n);
    gone[e] = rest(g, i) * k_z;
    d_beta[e] = std::fma(-decay, k_m, r_v) + (of_pairs.pairs[0][i] + of_pairs.pairs[1][i]);
  }
  float from = own[0] + own[1], until = gone[0] + gone[1];
#pragma unroll
  for (int apart = 1; apart < 32; apart *= 2) {
    const float later = __shfl_down_sync(~0u, from, static_cast<unsigned>(apart));
    const float earlier = __shfl_up_sync(~0u, until, static_cast<unsigned>(apart));
    if (lane + apart < 32) from += later;
    if (lane >= apart) until += earlier;
  }
  float next = __shfl_down_sync(~0u, from, 1u), before = __shfl_up_sync(~0u, until, 1u);
  if (lane == 31) next = 0;
  if (lane == 0) before = 0;
  float inner = 0;
  for (int n = 0; n < sheets; ++n)
#pragma unroll
    for (int i = 0; i < 8; ++i) inner += sums[n].inner[i];
  const float kept = cuda::approximate_exp2(g.high[kMostRows - 1] + g.low[kMostRows - 1]);
  const std::int64_t row = p.cu_seqlens != nullptr ? 0 : all.slots.per_row.divide(slot);
  GateTerms terms{0, 0};
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int i = 2 * lane + e;
    if (i >= chunk.rows) continue;
    const std::int64_t token = chunk.begin - row * p.d.tokens + i;
    const bool has = p.mask == nullptr || p.mask[chunk.begin + i] != 0;
    const float f = e == 0 ? from : own[1] + next, z = e == 0 ? before : before + gone[0];
    float d_g =
        has ? std::fma(kept, inner, (f + (of_pairs.below[0][i] + of_pairs.below[1][i])) + z) : 0.0f;
    float of_beta = has ? d_beta[e] : 0.0f;
    if (has && p.d.beta_sigmoid) {
      const float x = p.beta[p.beta_stride.at(row, token, head)];
      const float slope = math::sigmoid(x) * math::sigmoid(-x);
      of_beta *= p.d.allow_neg_eigval ? 2 * slope : slope;
    }
    if (has && p.d.gate) {
      const float a = p.g[p.g_stride.at(row, token, head)];
      const float a_log = p.a_log[head], bias = p.dt_bias[head];
      const float log_decay = gdn_log_decay(a, a_log, bias);
      if (!(log_decay <= kGdnReset)) {
        terms.a_log = std::fma(d_g, log_decay, terms.a_log);
        d_g = d_g * -math::exp(a_log) * gdn_softplus_slope(a + bias);
        terms.dt_bias += d_g;
      }
    }
    all.d_g[all.d_g_stride.at(row, token, head)] = d_g;
    all.d_beta[all.d_beta_stride.at(row, token, head)] = of_beta;
  }
  if (!p.d.gate) return;
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) {
    terms.a_log += __shfl_xor_sync(~0u, terms.a_log, apart);
    terms.dt_bias += __shfl_xor_sync(~0u, terms.dt_bias, apart);
  }
  if (lane == 0) all.places.terms[item] = terms;
}

// d_a_log and d_dt_bias: a block for each head, in a fixed order.
template <class = void>
__global__ void __launch_bounds__(kGateThreads)
    backward_terms(const __grid_constant__ GatesProblem all) {
  __shared__ double a_log[kGateThreads], dt_bias[kGateThreads];
  const int thread = static_cast<int>(threadIdx.x);
  double sums[2] = {};
  for (std::int64_t slot = thread; all.p.d.gate && slot < all.slots.count; slot += kGateThreads) {
    if (all.slots.at(slot).rows == 0) continue;
    const GateTerms& x = all.places.terms[slot * all.p.d.value_heads + blockIdx.x];
    sums[0] += static_cast<double>(x.a_log);
    sums[1] += static_cast<double>(x.dt_bias);
  }
  a_log[thread] = sums[0];
  dt_bias[thread] = sums[1];
  for (int apart = kGateThreads / 2; apart > 0; apart /= 2) {
    __syncthreads();
    if (thread >= apart) continue;
    a_log[thread] += a_log[thread + apart];
    dt_bias[thread] += dt_bias[thread + apart];
  }
  if (thread != 0) return;
  if (all.d_a_log != nullptr) all.d_a_log[blockIdx.x] = static_cast<float>(a_log[0]);
  if (all.d_dt_bias != nullptr) all.d_dt_bias[blockIdx.x] = static_cast<float>(dt_bias[0]);
}

}  // namespace bittern::chunk_backward
