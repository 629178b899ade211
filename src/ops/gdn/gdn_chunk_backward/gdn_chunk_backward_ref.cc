#include "bittern/ops/gdn_chunk_backward.h"
#include "core/dot.h"
#include "ops/gdn/gdn.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = GdnChunkBackward;

// A row of numbers per token, or per key of a state.
using Rows = std::vector<std::vector<float>>;

Rows zeros(std::size_t rows, std::size_t columns) {
  return Rows(rows, std::vector<float>(columns));
}

float dot(const std::vector<float>& a, const std::vector<float>& b, std::size_t n) {
  return bittern::dot(a.data(), b.data(), static_cast<std::int64_t>(n));
}
float dot(const std::vector<float>& a, const std::vector<float>& b) { return dot(a, b, a.size()); }

// acc + a . b, terms ascending.
float product(const std::vector<float>& a, const std::vector<float>& b, float acc = 0) {
  for (std::size_t c = 0; c < a.size(); ++c) acc = std::fma(a[c], b[c], acc);
  return acc;
}
float product(const std::vector<float>& a, const Rows& b, std::size_t column) {
  float acc = 0;
  for (std::size_t c = 0; c < a.size(); ++c) acc = std::fma(a[c], b[c][column], acc);
  return acc;
}

struct Head {
  const Op::Desc& d;
  const Op::Args& a;
  std::int64_t sequence, head;

  bool masked(std::int64_t t) const { return a.mask && a.mask.as<std::uint8_t>()[t] == 0; }
  template <class View>
  std::int64_t at(const View& x, std::int64_t t) const {
    return gdn_at(x, t, head);
  }
  template <class View>
  std::int64_t key_at(const View& x, std::int64_t t) const {
    return gdn_at(x, t, d.key_head(head));
  }

  Rows load_state(const ConstView& x) const {
    const auto keys = static_cast<std::size_t>(d.key_dim);
    const auto width = static_cast<std::size_t>(d.value_dim);
    Rows state = zeros(keys, width);
    for (std::size_t i = 0; i < keys; ++i)
      for (std::size_t j = 0; j < width; ++j)
        if (x) state[i][j] = x.as<float>()[state_at(x, i, j)];
    return state;
  }
  std::int64_t state_at(const ConstView& x, std::size_t i, std::size_t j) const {
    return gdn_state_at(d, x, sequence, head, static_cast<std::int64_t>(i),
                        static_cast<std::int64_t>(j));
  }
};

// What the forward pass knows of a chunk.
struct Chunk {
  GdnChunk place;
  Rows q, k, v, d_o, kk, e, l, p, y, state;  // e: E of the header
  std::vector<float> beta;
  std::vector<GdnSum> sum;
  std::size_t rows() const { return k.size(); }
};

template <class X>
Rows load(const Head& h, const ConstView& x, const GdnChunk& chunk, bool keys) {
  const std::int64_t width = keys ? h.d.key_dim : h.d.value_dim;
  Rows rows;
  for (std::int64_t t = chunk.begin; t < chunk.begin + chunk.rows; ++t) {
    std::vector<float>& row = rows.emplace_back(static_cast<std::size_t>(width));
    if (h.masked(t)) continue;
    for (std::int64_t c = 0; c < width; ++c) {
      const std::int64_t first = keys ? h.key_at(x, t) : h.at(x, t);
      row[static_cast<std::size_t>(c)] = to_math(x.as<X>()[first + c]);
    }
  }
  return rows;
}

float inverse_norm(const std::vector<float>& x) { return 1.0f / std::sqrt(dot(x, x) + 1e-6f); }

void scale(std::vector<float>& x, float factor) {
  for (float& e : x) e *= factor;
}

// The forward pass over a chunk; `state` goes from before it to after it.
template <class X>
Chunk forward(const Head& h, const GdnChunk& place, Rows& state) {
  const Op::Desc& d = h.d;
  Chunk c;
  c.place = place;
  c.q = load<X>(h, h.a.q, place, true);
  c.k = load<X>(h, h.a.k, place, true);
  c.v = load<X>(h, h.a.v, place, false);
  c.d_o = load<X>(h, h.a.d_o, place, false);
  const std::size_t n = c.rows(), width = c.v[0].size();
  c.state = state;
  c.beta.resize(n);
  c.sum.resize(n);
  double total = 0;
  for (std::size_t i = 0; i < n; ++i) {
    if (d.qk_l2norm) {
      scale(c.q[i], inverse_norm(c.q[i]));
      scale(c.k[i], inverse_norm(c.k[i]));
    }
    scale(c.q[i], d.query_scale());
    const std::int64_t t = place.begin + static_cast<std::int64_t>(i);
    float g = 0;
    if (!h.masked(t)) {
      c.beta[i] = gdn_strength(d, h.a.beta.as<float>()[h.at(h.a.beta, t)]);
      g = h.a.g.as<float>()[h.at(h.a.g, t)];
      if (d.gate)
        g = gdn_log_decay(g, h.a.a_log.as<float>()[h.head], h.a.dt_bias.as<float>()[h.head]);
    }
    total = gdn_next_sum(total, g);
    c.sum[i] = gdn_sum(total);
  }
  c.kk = c.e = c.l = c.p = zeros(n, n);
  c.y = zeros(n, width);
  for (std::size_t i = 0; i < n; ++i) {
    for (std::size_t j = 0; j <= i; ++j) {
      c.e[i][j] = gdn_decay(c.sum[i], c.sum[j]);
      c.kk[i][j] = product(c.k[i], c.k[j]);
      if (j < i) c.l[i][j] = c.beta[i] * c.kk[i][j] * c.e[i][j];
      c.p[i][j] = product(c.q[i], c.k[j]) * c.e[i][j];
    }
  }
  for (std::size_t x = 0; x < width; ++x) {
    for (std::size_t i = 0; i < n; ++i) {
      float acc = 0;
      for (std::size_t j = 0; j < i; ++j) acc = std::fma(c.l[i][j], c.y[j][x], acc);
      const float seen = product(c.k[i], c.state, x);
      c.y[i][x] = c.beta[i] * std::fma(-gdn_decay(c.sum[i]), seen, c.v[i][x]) - acc;
    }
    for (std::size_t m = 0; m < state.size(); ++m) {
      float acc = gdn_decay(c.sum[n - 1]) * state[m][x];
      for (std::size_t i = 0; i < n; ++i)
        acc = std::fma(c.k[i][m], gdn_decay(c.sum[n - 1], c.sum[i]) * c.y[i][x], acc);
      state[m][x] = acc;
    }
  }
  return c;
}

// The gradients of a chunk's rows. `grad` (H of the header) goes from after the chunk to before it.
struct Gradients {
  Rows q, k, v;
  std::vector<float> g, beta;
};

Gradients backward(const Chunk& c, Rows& grad) {
  const std::size_t n = c.rows(), keys = c.k[0].size(), width = c.v[0].size();
  const GdnSum last = c.sum[n - 1];
  std::vector<float> decay(n), rest(n), b(n);  // e, l, b of the header
  for (std::size_t i = 0; i < n; ++i) {
    decay[i] = gdn_decay(c.sum[i]);
    rest[i] = gdn_decay(last, c.sum[i]);
    b[i] = -(c.beta[i] * decay[i]);
  }

  Rows r = zeros(n, width);
  for (std::size_t x = 0; x < width; ++x) {
    for (std::size_t i = n; i-- > 0;) {
      float acc = rest[i] * product(c.k[i], grad, x);
      for (std::size_t j = i; j < n; ++j) acc = std::fma(c.p[j][i], c.d_o[j][x], acc);
      float solved = 0;
      for (std::size_t j = n - 1; j > i; --j) solved = std::fma(c.l[j][i], r[j][x], solved);
      r[i][x] = acc - solved;
    }
  }

  Rows dl = zeros(n, n), dp = dl, decayed_dl = dl, decayed_dp = dl, x = dl, w = dl;
  for (std::size_t i = 0; i < n; ++i) {
    for (std::size_t j = 0; j <= i; ++j) {
      dp[i][j] = product(c.d_o[i], c.y[j]);
      decayed_dp[i][j] = dp[i][j] * c.e[i][j];
      if (j == i) continue;
      dl[i][j] = -product(r[i], c.y[j]);
      decayed_dl[i][j] = dl[i][j] * c.e[i][j];
      x[i][j] = c.beta[i] * decayed_dl[i][j];
      w[i][j] = std::fma(dl[i][j], c.l[i][j], dp[i][j] * c.p[i][j]);
    }
  }

  Rows m = zeros(n, keys), nn = m, z = m;
  for (std::size_t i = 0; i < n; ++i) {
    for (std::size_t s = 0; s < keys; ++s) {
      m[i][s] = product(r[i], c.state[s]);
      nn[i][s] = product(c.d_o[i], c.state[s]);
      z[i][s] = product(c.y[i], grad[s]);
    }
  }

  Gradients out{zeros(n, keys), zeros(n, keys), zeros(n, width), {}, {}};
  for (std::size_t i = 0; i < n; ++i) {
    for (std::size_t s = 0; s < keys; ++s) {
      float dq = decay[i] * nn[i][s];
      for (std::size_t j = 0; j <= i; ++j) dq = std::fma(decayed_dp[i][j], c.k[j][s], dq);
      out.q[i][s] = dq;
      float dk = std::fma(b[i], m[i][s], rest[i] * z[i][s]);
      for (std::size_t j = i; j < n; ++j) dk = std::fma(decayed_dp[j][i], c.q[j][s], dk);
      for (std::size_t j = 0; j <= i; ++j) dk = std::fma(x[i][j], c.k[j][s], dk);
      for (std::size_t j = i; j < n; ++j) dk = std::fma(x[j][i], c.k[j][s], dk);
      out.k[i][s] = dk;
    }
    for (std::size_t s = 0; s < width; ++s) out.v[i][s] = c.beta[i] * r[i][s];
    const float seen = dot(c.k[i], m[i]);
    out.beta.push_back(std::fma(-decay[i], seen, dot(r[i], c.v[i])) +
                       dot(decayed_dl[i], c.kk[i], i));
  }

  const std::vector<float> ones(n, 1.0f);
  std::vector<float> before(n);  // Z of the header
  for (std::size_t i = 1; i < n; ++i)
    before[i] = before[i - 1] + rest[i - 1] * dot(c.k[i - 1], z[i - 1]);
  float inner = 0;
  for (std::size_t s = 0; s < width; ++s) {
    std::vector<float> one, other;
    for (std::size_t i = 0; i < keys; ++i) {
      one.push_back(c.state[i][s]);
      other.push_back(grad[i][s]);
    }
    inner += dot(one, other);
  }
  out.g.resize(n);
  std::vector<float> columns(n);
  float own = 0;
  for (std::size_t i = n; i-- > 0;) {
    own += std::fma(b[i], dot(c.k[i], m[i]), decay[i] * dot(c.q[i], nn[i]));
    for (std::size_t j = 0; j < i; ++j) columns[j] += w[i][j];
    out.g[i] = std::fma(decay[n - 1], inner, own + dot(columns, ones, i) + before[i]);
  }

  for (std::size_t s = 0; s < keys; ++s) {
    for (std::size_t v = 0; v < width; ++v) {
      float acc = decay[n - 1] * grad[s][v];
      for (std::size_t i = 0; i < n; ++i) acc = std::fma(c.k[i][s], b[i] * r[i][v], acc);
      for (std::size_t i = 0; i < n; ++i) acc = std::fma(c.q[i][s], decay[i] * c.d_o[i][v], acc);
      grad[s][v] = acc;
    }
  }
  return out;
}

// Sums over the tokens of a sequence.
struct GateSums {
  float a_log = 0, dt_bias = 0;
};

// One sequence and value head: d_v, d_g, d_beta, d_initial_state; d_q and d_k are added to.
template <class X>
GateSums run_head(const Head& h, const Sequence& sequence, Rows& dq, Rows& dk) {
  const Op::Desc& d = h.d;
  const Op::Args& a = h.a;
  Rows state = h.load_state(a.initial_state);
  std::vector<Chunk> chunks;
  for (std::int64_t c = 0; c < d.chunks(sequence.end - sequence.begin); ++c)
    chunks.push_back(forward<X>(h, gdn_chunk(d, sequence, c), state));

  Rows grad = h.load_state(a.d_final_state);
  std::vector<float> dg(static_cast<std::size_t>(sequence.end - sequence.begin));
  for (auto c = chunks.rbegin(); c != chunks.rend(); ++c) {
    const Gradients gradients = backward(*c, grad);
    for (std::size_t i = 0; i < c->rows(); ++i) {
      const std::int64_t t = c->place.begin + static_cast<std::int64_t>(i);
      const auto row = static_cast<std::size_t>(t - sequence.begin);
      const bool masked = h.masked(t);
      for (std::size_t s = 0; s < dq[row].size(); ++s) {
        dq[row][s] += gradients.q[i][s];
        dk[row][s] += gradients.k[i][s];
      }
      for (std::int64_t s = 0; s < d.value_dim; ++s) {
        const float dv = masked ? 0 : gradients.v[i][static_cast<std::size_t>(s)];
        a.d_v.as<X>()[h.at(a.d_v, t) + s] = from_math<X>(dv);
      }
      dg[row] = masked ? 0 : gradients.g[i];
      float dbeta = masked ? 0 : gradients.beta[i];
      if (d.beta_sigmoid && !masked) {
        const float x = a.beta.as<float>()[h.at(a.beta, t)];
        const float slope = math::sigmoid(x) * math::sigmoid(-x);
        dbeta *= d.allow_neg_eigval ? 2 * slope : slope;
      }
      a.d_beta.as<float>()[h.at(a.d_beta, t)] = dbeta;
    }
  }

  GateSums sums;
  for (std::int64_t t = sequence.begin; t < sequence.end; ++t) {
    float out = dg[static_cast<std::size_t>(t - sequence.begin)];
    if (d.gate && !h.masked(t)) {
      const float input = a.g.as<float>()[h.at(a.g, t)], bias = a.dt_bias.as<float>()[h.head];
      const float rate = -math::exp(a.a_log.as<float>()[h.head]);
      const float log_decay = gdn_log_decay(input, a.a_log.as<float>()[h.head], bias);
      if (!(log_decay <= kGdnReset)) {
        sums.a_log = std::fma(out, log_decay, sums.a_log);
        out = out * rate * gdn_softplus_slope(input + bias);
        sums.dt_bias += out;
      }
    }
    a.d_g.as<float>()[h.at(a.d_g, t)] = out;
  }
  for (std::size_t i = 0; i < grad.size(); ++i)
    for (std::size_t j = 0; j < grad[i].size(); ++j)
      if (a.d_initial_state)
        a.d_initial_state.as<float>()[h.state_at(a.d_initial_state, i, j)] = grad[i][j];
  return sums;
}

// d_q or d_k of a key head from the gradient of what the rule saw.
template <class X>
void store_keys(const Head& h, const Sequence& sequence, const ConstView& x, Rows& gradient,
                float factor, const MutView& to) {
  for (std::int64_t t = sequence.begin; t < sequence.end; ++t) {
    std::vector<float>& out = gradient[static_cast<std::size_t>(t - sequence.begin)];
    if (factor != 1) scale(out, factor);
    if (h.d.qk_l2norm) {
      std::vector<float> unit = load<X>(h, x, {t, 1, 0}, true)[0];
      const float inverse = inverse_norm(unit);
      scale(unit, inverse);
      const float along = dot(out, unit);
      for (std::size_t s = 0; s < out.size(); ++s)
        out[s] = inverse * std::fma(-along, unit[s], out[s]);
    }
    for (std::size_t s = 0; s < out.size(); ++s)
      to.as<X>()[h.key_at(to, t) + static_cast<std::int64_t>(s)] =
          from_math<X>(h.masked(t) ? 0 : out[s]);
  }
}

template <class X>
void run_as(const Op::Desc& d, const Op::Args& a) {
  const std::vector<Sequence> sequences = sequences_of(d.rows(), a.cu_seqlens);
  std::vector<GateSums> totals(static_cast<std::size_t>(d.value_heads));
  for (std::int64_t n = 0; n < d.sequence_count(); ++n) {
    const Sequence& sequence = sequences[static_cast<std::size_t>(n)];
    const auto tokens = static_cast<std::size_t>(sequence.end - sequence.begin);
    for (std::int64_t key_head = 0; key_head < d.key_heads; ++key_head) {
      Rows dq = zeros(tokens, static_cast<std::size_t>(d.key_dim)), dk = dq;
      for (std::int64_t i = 0; i < d.value_heads / d.key_heads; ++i) {
        const Head h{d, a, n, d.value_head(key_head, i)};
        const GateSums sums = run_head<X>(h, sequence, dq, dk);
        totals[static_cast<std::size_t>(h.head)].a_log += sums.a_log;
        totals[static_cast<std::size_t>(h.head)].dt_bias += sums.dt_bias;
      }
      const Head h{d, a, n, d.value_head(key_head, 0)};
      store_keys<X>(h, sequence, a.q, dq, d.query_scale(), a.d_q);
      store_keys<X>(h, sequence, a.k, dk, 1, a.d_k);
    }
  }
  for (std::size_t i = 0; i < totals.size(); ++i) {
    if (a.d_a_log) a.d_a_log.as<float>()[i] = totals[i].a_log;
    if (a.d_dt_bias) a.d_dt_bias.as<float>()[i] = totals[i].dt_bias;
  }
}

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  return visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    run_as<X>(d, a);
    return Status();
  });
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<GdnChunkBackward>> gdn_chunk_backward_ref() { return kKernels; }

}  // namespace bittern
