#include "bittern/ops/gdn_chunk_forward.h"
#include "core/dot.h"
#include "ops/gdn/gdn.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = GdnChunkForward;

// A row of numbers per token, or per key of a state.
using Rows = std::vector<std::vector<float>>;

// The rows of one head and chunk, widened; rows of masked tokens are zeros.
template <class X>
Rows load(const Op::Args& a, const ConstView& x, const GdnChunk& chunk, std::int64_t head) {
  const std::int64_t width = x.shape[3];
  Rows rows;
  for (std::int64_t t = chunk.begin; t < chunk.begin + chunk.rows; ++t) {
    std::vector<float>& row = rows.emplace_back(static_cast<std::size_t>(width));
    if (a.mask && a.mask.as<std::uint8_t>()[t] == 0) continue;
    for (std::int64_t c = 0; c < width; ++c)
      row[static_cast<std::size_t>(c)] = to_math(x.as<X>()[gdn_at(x, t, head) + c]);
  }
  return rows;
}

void normalise(Rows& rows) {
  for (std::vector<float>& x : rows) {
    const float squares = dot(x.data(), x.data(), static_cast<std::int64_t>(x.size()));
    const float inverse = 1.0f / std::sqrt(squares + 1e-6f);
    for (float& e : x) e *= inverse;
  }
}

float product(const std::vector<float>& a, const std::vector<float>& b) {
  float acc = 0;
  for (std::size_t c = 0; c < a.size(); ++c) acc = std::fma(a[c], b[c], acc);
  return acc;
}

float product(const std::vector<float>& a, const Rows& b, std::size_t column) {
  float acc = 0;
  for (std::size_t c = 0; c < a.size(); ++c) acc = std::fma(a[c], b[c][column], acc);
  return acc;
}

template <class X>
void run_chunk(const Op::Desc& d, const Op::Args& a, const GdnChunk& chunk, std::int64_t h,
               Rows& state) {
  Rows q = load<X>(a, a.q, chunk, d.key_head(h));
  Rows k = load<X>(a, a.k, chunk, d.key_head(h));
  const Rows v = load<X>(a, a.v, chunk, h);
  if (d.qk_l2norm) {
    normalise(q);
    normalise(k);
  }
  for (std::vector<float>& row : q)
    for (float& e : row) e *= d.query_scale();

  const auto n = static_cast<std::size_t>(chunk.rows);
  std::vector<float> beta(n);
  std::vector<GdnSum> sum(n);
  double total = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const std::int64_t t = chunk.begin + static_cast<std::int64_t>(i);
    float g = 0;
    if (!a.mask || a.mask.as<std::uint8_t>()[t] != 0) {
      beta[i] = gdn_strength(d, a.beta.as<float>()[gdn_at(a.beta, t, h)]);
      g = a.g.as<float>()[gdn_at(a.g, t, h)];
      if (d.gate) g = gdn_log_decay(g, a.a_log.as<float>()[h], a.dt_bias.as<float>()[h]);
    }
    total = gdn_next_sum(total, g);
    sum[i] = gdn_sum(total);
  }

  Rows l(n, std::vector<float>(n)), p = l;
  for (std::size_t i = 0; i < n; ++i) {
    for (std::size_t j = 0; j <= i; ++j) {
      const float decay = gdn_decay(sum[i], sum[j]);
      l[i][j] = beta[i] * product(k[i], k[j]) * decay;  // read where j < i
      p[i][j] = product(q[i], k[j]) * decay;
    }
  }

  const auto width = static_cast<std::size_t>(d.value_dim);
  for (std::size_t c = 0; c < width; ++c) {
    std::vector<float> y(n);
    for (std::size_t i = 0; i < n; ++i) {
      const float decay = gdn_decay(sum[i]);
      float acc = 0;
      for (std::size_t j = 0; j < i; ++j) acc = std::fma(l[i][j], y[j], acc);
      y[i] = beta[i] * std::fma(-decay, product(k[i], state, c), v[i][c]) - acc;
      float o = decay * product(q[i], state, c);
      for (std::size_t j = 0; j <= i; ++j) o = std::fma(p[i][j], y[j], o);
      const std::int64_t t = chunk.begin + static_cast<std::int64_t>(i);
      if (a.mask && a.mask.as<std::uint8_t>()[t] == 0) o = 0;
      a.o.as<X>()[gdn_at(a.o, t, h) + static_cast<std::int64_t>(c)] = from_math<X>(o);
    }
    for (std::size_t m = 0; m < state.size(); ++m) {
      float acc = gdn_decay(sum[n - 1]) * state[m][c];
      for (std::size_t i = 0; i < n; ++i)
        acc = std::fma(k[i][m], gdn_decay(sum[n - 1], sum[i]) * y[i], acc);
      state[m][c] = acc;
    }
  }
}

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  const std::vector<Sequence> sequences = sequences_of(d.rows(), a.cu_seqlens);
  const auto keys = static_cast<std::size_t>(d.key_dim);
  const auto width = static_cast<std::size_t>(d.value_dim);
  for (std::size_t n = 0; n < sequences.size(); ++n) {
    for (std::int64_t h = 0; h < d.value_heads; ++h) {
      const auto at = [&](const auto& view, std::size_t i, std::size_t j) {
        return gdn_state_at(d, view, static_cast<std::int64_t>(n), h, static_cast<std::int64_t>(i),
                            static_cast<std::int64_t>(j));
      };
      Rows state(keys, std::vector<float>(width));
      for (std::size_t i = 0; i < keys; ++i)
        for (std::size_t j = 0; j < width; ++j)
          if (a.initial_state) state[i][j] = a.initial_state.as<float>()[at(a.initial_state, i, j)];
      for (std::int64_t c = 0; c < d.chunks(sequences[n].end - sequences[n].begin); ++c) {
        BITTERN_TRY((visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
          run_chunk<X>(d, a, gdn_chunk(d, sequences[n], c), h, state);
          return Status();
        })));
      }
      for (std::size_t i = 0; i < keys; ++i)
        for (std::size_t j = 0; j < width; ++j)
          if (a.final_state) a.final_state.as<float>()[at(a.final_state, i, j)] = state[i][j];
    }
  }
  return {};
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<GdnChunkForward>> gdn_chunk_forward_ref() { return kKernels; }

}  // namespace bittern
