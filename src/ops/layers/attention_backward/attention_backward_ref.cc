#include <limits>

#include "bittern/ops/attention_backward.h"
#include "core/math.h"
#include "core/numerics.h"
#include "core/sequences.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = AttentionBackward;

constexpr float kNone = -std::numeric_limits<float>::infinity();

float dot(const float* a, const float* b, std::int64_t n) {
  float sum = 0;
  for (std::int64_t j = 0; j < n; ++j) sum = std::fma(a[j], b[j], sum);
  return sum;
}

// to = fma(factor, row, to)
void add_row(float factor, const float* row, std::int64_t n, float* to) {
  for (std::int64_t j = 0; j < n; ++j) to[j] = std::fma(factor, row[j], to[j]);
}

// A token that a query sees.
struct Seen {
  std::int64_t token;
  float u, x, e, g;  // as in the header
};

// Query i of head h, in a sequence that begins at `begin`. Writes d_q, adds to d_k and d_v.
void add_query(const Op::Desc& d, const Op::Args& a, std::int64_t begin, std::int64_t i,
               std::int64_t h) {
  const std::int64_t head = h / d.group(), dim = d.dim;
  const float scale = d.softmax_scale();
  const auto cap = static_cast<float>(d.softcap);
  const float* q = a.q.as<float>() + a.q.at(i, h);
  const float* d_out = a.d_out.as<float>() + a.d_out.at(i, h);
  const auto key = [&](const auto& view, std::int64_t t) {
    return view.template as<float>() + view.at(t, head);
  };

  std::vector<float> scaled;
  for (std::int64_t j = 0; j < dim; ++j) scaled.push_back(q[j] * scale);
  std::vector<Seen> seen;
  float m = kNone;
  for (std::int64_t t = std::max(begin, i - d.reach() + 1); t <= i; ++t) {
    Seen s{.token = t, .u = 0, .x = dot(scaled.data(), key(a.k, t), dim), .e = 0, .g = 0};
    if (cap > 0) {
      s.u = math::tanh(s.x / cap);
      s.x = cap * s.u;
    }
    s.g = dot(d_out, key(a.v, t), dim);
    if (s.x > m) m = s.x;
    seen.push_back(s);
  }
  float l = 0, sum = 0;
  for (Seen& s : seen) {
    s.e = math::exp(m == kNone ? s.x : s.x - m);
    l += s.e;
    sum = std::fma(s.e, s.g, sum);
  }
  const float r = l == 0 ? 0.0f : 1.0f / l;
  const float mean = r * sum;
  std::vector<float> d_q(static_cast<std::size_t>(dim), 0.0f);
  for (const Seen& s : seen) {
    const float p = s.e * r;
    float z = p * (s.g - mean);
    if (cap > 0) z *= std::fma(-s.u, s.u, 1.0f);
    add_row(z, key(a.k, s.token), dim, d_q.data());
    add_row(z, scaled.data(), dim, key(a.d_k, s.token));
    add_row(p, d_out, dim, key(a.d_v, s.token));
  }
  float* to = a.d_q.as<float>() + a.d_q.at(i, h);
  for (std::int64_t j = 0; j < dim; ++j) to[j] = scale * d_q[static_cast<std::size_t>(j)];
}

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  for (std::int64_t t = 0; t < d.tokens; ++t) {
    for (std::int64_t h = 0; h < d.kv_heads; ++h) {
      std::fill_n(a.d_k.as<float>() + a.d_k.at(t, h), d.dim, 0.0f);
      std::fill_n(a.d_v.as<float>() + a.d_v.at(t, h), d.dim, 0.0f);
    }
  }
  for (const Sequence& s : sequences_of(d.rows(), a.cu_seqlens))
    for (std::int64_t h = 0; h < d.heads; ++h)
      for (std::int64_t i = s.begin; i < s.end; ++i) add_query(d, a, s.begin, i, h);
  return {};
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<AttentionBackward>> attention_backward_ref() { return kKernels; }

}  // namespace bittern
