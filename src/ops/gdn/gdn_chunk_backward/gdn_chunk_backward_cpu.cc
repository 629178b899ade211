#include "bittern/ops/gdn_chunk_backward.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"
#include "ops/gdn/gdn.h"
#include "ops/gdn/gdn_scratch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/gdn/gdn_chunk_backward/gdn_chunk_backward_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "ops/gdn/gdn-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = GdnChunkBackward;
using cpu::gdn::BackwardScratch;
using cpu::gdn::GateSums;
using gdn::kLanes;
using gdn::kRows;
using gdn::Padded;

// One value head in one sequence.
struct Head {
  const Op::Desc& d;
  const Op::Args& a;
  const Sequence& sequence;
  std::int64_t key_head, head;
  std::int64_t index;  // of the sequence
  std::int64_t k_stride, v_stride;
};

// ---- forward ----

// Keys, and their transpose; values and gates.
void LoadChunk(const Head& h, const GdnChunk& chunk, const BackwardScratch& s) {
  const std::int64_t rows = chunk.rows;
  gdn::LoadKeys(h.d, h.a.k, h.a.mask, chunk, h.key_head, s.keys_queries);
  gdn::Transpose(s.keys_queries, h.k_stride, rows, h.d.key_dim, s.transposed, kRows);
  gdn::LoadRows(h.a.v, h.a.mask, chunk, h.head, s.v);
  gdn::LoadGates(h.d, h.a, chunk, h.head, s.sum, s.beta);
  gdn::ExpRow(s.sum, s.decay);
  gdn::ExpRowFromLast(s.sum, rows, s.rest);
}

void Prefetch(const Head& h, const GdnChunk& chunk) {
  gdn::Prefetch(h.a.k, chunk, h.key_head);
  gdn::Prefetch(h.a.v, chunk, h.head);
}

// Keeps k k^T and y of each chunk, and the state before it, transposed.
void Forward(const Head& h, const BackwardScratch& s) {
  const gdn::D tag;
  const std::int64_t width = h.d.value_dim;
  if (h.a.initial_state) {
    gdn::LoadState(h.d, h.a.initial_state, h.index, h.head, s.state);
  } else {
    std::fill_n(s.state, h.d.key_dim * h.v_stride, 0.0f);
  }
  const std::int64_t chunks = h.d.chunks(h.sequence.end - h.sequence.begin);
  for (std::int64_t n = 0; n < chunks; ++n) {
    const GdnChunk chunk = gdn_chunk(h.d, h.sequence, n);
    const std::int64_t rows = chunk.rows;
    LoadChunk(h, chunk, s);
    if (n + 1 < chunks) Prefetch(h, gdn_chunk(h.d, h.sequence, n + 1));
    float* kk = s.kk + n * h.d.chunk * kRows;
    matmul::MultiplyToLower(rows, h.d.key_dim, {s.keys_queries, h.k_stride}, s.transposed, kRows,
                            kk, kRows);
    gdn::Weights(rows, s.beta, s.sum, kk, s.l);
    gdn::Transpose(s.state, h.v_stride, h.d.key_dim, width, s.states + n * s.state_size,
                   h.k_stride);
    float* y = s.y + n * h.d.chunk * h.v_stride;
    matmul::Multiply(rows, width, h.d.key_dim, {s.keys_queries, h.k_stride}, s.state, h.v_stride, y,
                     h.v_stride);
    for (std::int64_t i = 0; i < rows; ++i) {
      const auto decay = hn::Set(tag, s.decay[i]), beta = hn::Set(tag, s.beta[i]);
      for (std::int64_t j = i * h.v_stride; j < (i + 1) * h.v_stride; j += kLanes) {
        const auto seen = hn::LoadU(tag, y + j), v = hn::LoadU(tag, s.v + j);
        hn::StoreU(hn::Mul(beta, hn::NegMulAdd(decay, seen, v)), tag, y + j);
      }
    }
    matmul::SolveLower(rows, width, {s.l, kRows}, y, h.v_stride);
    std::copy_n(y, rows * h.v_stride, s.v);
    tile::ScaleRows(s.rest, s.v, h.v_stride, rows, width);
    tile::Scale(s.decay[rows - 1], s.state, h.d.key_dim * h.v_stride);
    matmul::Multiply(h.d.key_dim, width, rows, {s.keys_queries, 1, h.k_stride}, s.v, h.v_stride,
                     s.state, h.v_stride, true);
  }
}

// ---- backward ----

// From r . y in s.dl and d_o . y in s.dp: DL in place of the one, DP of the other, X and W.
void WeightGradients(std::int64_t rows, const BackwardScratch& s) {
  const gdn::D tag;
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j <= i; j += kLanes) {
      const std::int64_t at = i * kRows + j;
      const auto below = gdn::Before(j, i), on = gdn::Before(j, i + 1);
      const auto dl = hn::IfThenElseZero(below, hn::Neg(hn::LoadU(tag, s.dl + at)));
      const auto dp = hn::IfThenElseZero(on, hn::LoadU(tag, s.dp + at));
      const auto e = hn::LoadU(tag, s.e + at), p = hn::LoadU(tag, s.p + at);
      const auto w = hn::MulAdd(dl, hn::LoadU(tag, s.l + at), hn::Mul(dp, p));
      const auto decayed = hn::IfThenElseZero(below, hn::Mul(dl, e));
      hn::StoreU(hn::IfThenElseZero(below, w), tag, s.w + at);
      hn::StoreU(decayed, tag, s.dl + at);
      hn::StoreU(hn::IfThenElseZero(below, hn::Mul(hn::Set(tag, s.beta[i]), decayed)), tag,
                 s.x + at);
      hn::StoreU(hn::IfThenElseZero(on, hn::Mul(dp, e)), tag, s.dp + at);
    }
  }
}

// dbeta and dg, from the products with the state and the weights' gradients.
void GateGradients(const Head& h, std::int64_t rows, const float* kk, const float* state_transposed,
                   const BackwardScratch& s, float* dg) {
  const std::int64_t keys = h.d.key_dim;
  const float *k = s.keys_queries, *q = k + rows * h.k_stride;
  const float *m = s.projected, *n = m + rows * h.k_stride;
  float before = 0;
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::int64_t row = i * h.k_stride, values = i * h.v_stride, weights = i * kRows;
    const float seen = Dot(k + row, m + row, keys);
    s.dbeta[i] =
        std::fma(-s.decay[i], seen, Dot(s.gradients + values, s.v + values, h.d.value_dim)) +
        Dot(s.dl + weights, kk + weights, i);
    s.own[i] = std::fma(s.b[i], seen, s.decay[i] * Dot(q + row, n + row, keys));
    s.before[i] = before;
    before += s.rest[i] * Dot(k + row, s.z + row, keys);
  }
  float inner = 0;
  for (std::int64_t j = 0; j < h.d.value_dim; ++j)
    inner += Dot(state_transposed + j * h.k_stride, s.grad_transposed + j * h.k_stride, keys);
  const gdn::D tag;
  std::fill_n(s.columns, kRows, 0.0f);
  float own = 0;
  for (std::int64_t i = rows - 1; i >= 0; --i) {
    own += s.own[i];
    for (std::int64_t j = 0; j < i; j += kLanes) {
      const auto w = hn::LoadU(tag, s.w + i * kRows + j);
      hn::StoreU(hn::Add(hn::LoadU(tag, s.columns + j), w), tag, s.columns + j);
    }
    dg[i] = std::fma(s.decay[rows - 1], inner, own + Dot(s.columns, s.ones, i) + s.before[i]);
  }
}

// dq = e N and dk = fma(b, M, l Z), in s.dq and s.dk.
void KeyGradients(std::int64_t rows, std::int64_t stride, const BackwardScratch& s) {
  const gdn::D tag;
  const float *m = s.projected, *n = m + rows * stride;
  for (std::int64_t i = 0; i < rows; ++i) {
    const auto decay = hn::Set(tag, s.decay[i]), rest = hn::Set(tag, s.rest[i]);
    const auto b = hn::Set(tag, s.b[i]);
    for (std::int64_t j = i * stride; j < (i + 1) * stride; j += kLanes) {
      hn::StoreU(hn::Mul(decay, hn::LoadU(tag, n + j)), tag, s.dq + j);
      const auto to_rest = hn::Mul(rest, hn::LoadU(tag, s.z + j));
      hn::StoreU(hn::MulAdd(b, hn::LoadU(tag, m + j), to_rest), tag, s.dk + j);
    }
  }
}

void AddTo(float* sum, const float* x, std::int64_t n) {
  const gdn::D tag;
  for (std::int64_t i = 0; i < n; i += kLanes)
    hn::StoreU(hn::Add(hn::LoadU(tag, sum + i), hn::LoadU(tag, x + i)), tag, sum + i);
}

void BackwardChunk(const Head& h, std::int64_t index, const BackwardScratch& s) {
  const Op::Desc& d = h.d;
  const Op::Args& a = h.a;
  const GdnChunk chunk = gdn_chunk(d, h.sequence, index);
  const std::int64_t rows = chunk.rows, keys = d.key_dim, width = d.value_dim;
  const float* y = s.y + index * d.chunk * h.v_stride;
  const float* kk = s.kk + index * d.chunk * kRows;
  const float* state_transposed = s.states + index * s.state_size;
  float *k = s.keys_queries, *q = k + rows * h.k_stride;
  float *r = s.gradients, *d_o = r + rows * h.v_stride;

  LoadChunk(h, chunk, s);
  gdn::Prefetch(a.d_v, chunk, h.head);
  if (index > 0) {
    const GdnChunk next = gdn_chunk(d, h.sequence, index - 1);
    Prefetch(h, next);
    gdn::Prefetch(a.q, next, h.key_head);
    gdn::Prefetch(a.d_o, next, h.head);
  }
  gdn::LoadKeys(d, a.q, a.mask, chunk, h.key_head, q);
  tile::Scale(d.query_scale(), q, rows * h.k_stride);
  matmul::MultiplyToLower(rows, keys, {q, h.k_stride}, s.transposed, kRows, s.qk, kRows);
  gdn::Weights(rows, s.beta, s.sum, kk, s.l, s.qk, s.p, s.e);
  gdn::LoadRows(a.d_o, a.mask, chunk, h.head, d_o);
  for (std::int64_t i = 0; i < rows; ++i) s.b[i] = -(s.beta[i] * s.decay[i]);

  matmul::Multiply(rows, width, keys, {k, h.k_stride}, s.grad, h.v_stride, r, h.v_stride);
  tile::ScaleRows(s.rest, r, h.v_stride, rows, width);
  matmul::MultiplyUpper(rows, width, {s.p, 1, kRows}, d_o, h.v_stride, r, h.v_stride, true);
  matmul::SolveUpper(rows, width, {s.l, 1, kRows}, r, h.v_stride);

  gdn::Transpose(y, h.v_stride, rows, width, s.transposed, kRows);
  matmul::MultiplyToLower(rows, width, {r, h.v_stride}, s.transposed, kRows, s.dl, kRows);
  matmul::MultiplyToLower(rows, width, {d_o, h.v_stride}, s.transposed, kRows, s.dp, kRows);
  WeightGradients(rows, s);

  gdn::Transpose(s.grad, h.v_stride, keys, width, s.grad_transposed, h.k_stride);
  matmul::Multiply(2 * rows, keys, width, {r, h.v_stride}, state_transposed, h.k_stride,
                   s.projected, h.k_stride);
  matmul::Multiply(rows, keys, width, {y, h.v_stride}, s.grad_transposed, h.k_stride, s.z,
                   h.k_stride);
  float* dg = s.dg + index * d.chunk;
  GateGradients(h, rows, kk, state_transposed, s, dg);
  gdn::ClearMasked(a.mask, chunk, 1, dg);
  gdn::ClearMasked(a.mask, chunk, 1, s.dbeta);
  for (std::int64_t i = 0; i < rows; ++i) {
    float dbeta = s.dbeta[i];
    if (d.beta_sigmoid && !(a.mask && a.mask.as<std::uint8_t>()[chunk.begin + i] == 0)) {
      const float x = a.beta.as<float>()[gdn_at(a.beta, chunk.begin + i, h.head)];
      const float slope = math::sigmoid(x) * math::sigmoid(-x);
      dbeta *= d.allow_neg_eigval ? 2 * slope : slope;
    }
    a.d_beta.as<float>()[gdn_at(a.d_beta, chunk.begin + i, h.head)] = dbeta;
  }

  KeyGradients(rows, h.k_stride, s);
  matmul::MultiplyLower(rows, keys, {s.dp, kRows}, k, h.k_stride, s.dq, h.k_stride, true);
  matmul::MultiplyUpper(rows, keys, {s.dp, 1, kRows}, q, h.k_stride, s.dk, h.k_stride, true);
  matmul::MultiplyLower(rows, keys, {s.x, kRows}, k, h.k_stride, s.dk, h.k_stride, true);
  matmul::MultiplyUpper(rows, keys, {s.x, 1, kRows}, k, h.k_stride, s.dk, h.k_stride, true);
  AddTo(s.dq_sum + index * d.chunk * h.k_stride, s.dq, rows * h.k_stride);
  AddTo(s.dk_sum + index * d.chunk * h.k_stride, s.dk, rows * h.k_stride);

  std::copy_n(r, rows * h.v_stride, s.v);
  tile::ScaleRows(s.beta, s.v, h.v_stride, rows, width);
  gdn::ClearMasked(a.mask, chunk, h.v_stride, s.v);
  gdn::StoreRows(s.v, chunk, h.head, a.d_v);

  tile::ScaleRows(s.b, r, h.v_stride, rows, width);
  tile::ScaleRows(s.decay, d_o, h.v_stride, rows, width);
  tile::Scale(s.decay[rows - 1], s.grad, keys * h.v_stride);
  matmul::Multiply(keys, width, 2 * rows, {k, 1, h.k_stride}, r, h.v_stride, s.grad, h.v_stride,
                   true);
}

// d_g, and what a_log and dt_bias get of it.
GateSums StoreGateGradients(const Head& h, const float* dg) {
  GateSums sums{};
  const Op::Args& a = h.a;
  for (std::int64_t t = h.sequence.begin; t < h.sequence.end; ++t) {
    float out = dg[t - h.sequence.begin];
    if (h.d.gate && !(a.mask && a.mask.as<std::uint8_t>()[t] == 0)) {
      const float a_log = a.a_log.as<float>()[h.head], bias = a.dt_bias.as<float>()[h.head];
      const float input = a.g.as<float>()[gdn_at(a.g, t, h.head)];
      if (const float log_decay = gdn_log_decay(input, a_log, bias); !(log_decay <= kGdnReset)) {
        sums.a_log = std::fma(out, log_decay, sums.a_log);
        out = out * -math::exp(a_log) * gdn_softplus_slope(input + bias);
        sums.dt_bias += out;
      }
    }
    a.d_g.as<float>()[gdn_at(a.d_g, t, h.head)] = out;
  }
  return sums;
}

// d_q or d_k of a key head, from the sum over its value heads.
void StoreKeyGradients(const Head& h, const ConstView& x, float factor, float* gradient,
                       const MutView& to, const BackwardScratch& s) {
  const gdn::D tag;
  const Op::Desc& d = h.d;
  for (std::int64_t n = 0; n < d.chunks(h.sequence.end - h.sequence.begin); ++n) {
    const GdnChunk chunk = gdn_chunk(d, h.sequence, n);
    float* rows = gradient + n * d.chunk * h.k_stride;
    tile::Scale(factor, rows, chunk.rows * h.k_stride);
    if (d.qk_l2norm) {
      gdn::LoadRows(x, h.a.mask, chunk, h.key_head, s.dq);
      for (std::int64_t i = 0; i < chunk.rows; ++i) {
        float *row = rows + i * h.k_stride, *unit = s.dq + i * h.k_stride;
        const float inverse = gdn::InverseNorm(unit, d.key_dim);
        tile::Scale(inverse, unit, h.k_stride);
        const auto along = hn::Set(tag, Dot(row, unit, d.key_dim)), f = hn::Set(tag, inverse);
        for (std::int64_t j = 0; j < h.k_stride; j += kLanes) {
          const auto across =
              hn::NegMulAdd(along, hn::LoadU(tag, unit + j), hn::LoadU(tag, row + j));
          hn::StoreU(hn::Mul(f, across), tag, row + j);
        }
      }
    }
    gdn::ClearMasked(h.a.mask, chunk, h.k_stride, rows);
    gdn::StoreRows(rows, chunk, h.key_head, to);
  }
}

// Items [begin, end): sequences x key heads.
void RunGdnChunkBackward(const Op::Desc& d, const Op::Args& a, const Sequence* sequences,
                         std::int64_t begin, std::int64_t end, const BackwardScratch& s,
                         GateSums* sums) {
  std::fill_n(s.ones, kRows, 1.0f);
  for (std::int64_t item = begin; item < end; ++item) {
    const std::int64_t sequence = item / d.key_heads;
    Head h{d, a,        sequences[sequence], item % d.key_heads,
           0, sequence, Padded(d.key_dim),   Padded(d.value_dim)};
    const std::int64_t chunks = d.chunks(h.sequence.end - h.sequence.begin);
    std::fill_n(s.dq_sum, chunks * d.chunk * h.k_stride, 0.0f);
    std::fill_n(s.dk_sum, chunks * d.chunk * h.k_stride, 0.0f);
    for (std::int64_t i = 0; i < d.value_heads / d.key_heads; ++i) {
      h.head = d.value_head(h.key_head, i);
      Forward(h, s);
      if (a.d_final_state) {
        gdn::LoadState(d, a.d_final_state, sequence, h.head, s.grad);
      } else {
        std::fill_n(s.grad, d.key_dim * h.v_stride, 0.0f);
      }
      for (std::int64_t n = chunks - 1; n >= 0; --n) BackwardChunk(h, n, s);
      if (a.d_initial_state) gdn::StoreState(d, s.grad, a.d_initial_state, sequence, h.head);
      sums[sequence * d.value_heads + h.head] = StoreGateGradients(h, s.dg);
    }
    StoreKeyGradients(h, a.q, d.query_scale(), s.dq_sum, a.d_q, s);
    StoreKeyGradients(h, a.k, 1, s.dk_sum, a.d_k, s);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD

#if HWY_ONCE
namespace bittern {
namespace {

using Op = GdnChunkBackward;
using cpu::gdn::GateSums;
using Scratch = cpu::gdn::BackwardScratch;
BITTERN_EXPORT(RunGdnChunkBackward);

// Sums for each sequence and head, then the threads' scratch, which starts a line.
std::size_t sums_bytes(const Op::Desc& d) {
  const auto heads = static_cast<std::size_t>(d.sequence_count() * d.value_heads);
  return (heads * sizeof(GateSums) + 63) / 64 * 64;
}

std::size_t workspace(const Op::Desc& d, Device) {
  return sums_bytes(d) + cpu::gdn::scratch_bytes<Scratch>(d);
}

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace workspace) {
  auto* sums = static_cast<GateSums*>(workspace.data);
  const Workspace rest{static_cast<std::byte*>(workspace.data) + sums_bytes(d),
                       workspace.bytes - sums_bytes(d)};
  (void)cpu::gdn::run_sequences<Scratch>(d, a, d.key_heads, rest, BITTERN_CALL(RunGdnChunkBackward),
                                         sums);
  for (std::int64_t h = 0; h < d.value_heads; ++h) {
    GateSums total{};
    for (std::int64_t n = 0; n < d.sequence_count(); ++n) {
      total.a_log += sums[n * d.value_heads + h].a_log;
      total.dt_bias += sums[n * d.value_heads + h].dt_bias;
    }
    if (a.d_a_log) a.d_a_log.as<float>()[h] = total.a_log;
    if (a.d_dt_bias) a.d_dt_bias.as<float>()[h] = total.dt_bias;
  }
  return {};
}

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run, workspace)};

}  // namespace

std::span<const Kernel<GdnChunkBackward>> gdn_chunk_backward_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
