#include "bittern/ops/gdn_recurrent_step.h"
#include "core/dot.h"
#include "core/math.h"
#include "core/numerics.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = GdnRecurrentStep;

// Key i and value j of a state, in either layout.
struct State {
  float* data;
  std::int64_t key_stride, value_stride;
  float& at(std::int64_t i, std::int64_t j) const {
    return data[i * key_stride + j * value_stride];
  }
};

// S^T x for column j.
float column(const Op::Desc& d, const State& s, const std::vector<float>& x, std::int64_t j) {
  if (d.state_layout == StateLayout::value_key) return dot(&s.at(0, j), x.data(), d.key_dim);
  float sum = 0;
  for (std::int64_t i = 0; i < d.key_dim; ++i)
    sum = std::fma(s.at(i, j), x[static_cast<std::size_t>(i)], sum);
  return sum;
}

template <class X>
std::vector<float> load(const X* from, std::int64_t n) {
  std::vector<float> x;
  for (std::int64_t i = 0; i < n; ++i) x.push_back(to_math(from[i]));
  return x;
}

void normalise(std::vector<float>& x) {
  const float squares = dot(x.data(), x.data(), static_cast<std::int64_t>(x.size()));
  const float inverse = 1.0f / std::sqrt(squares + 1e-6f);
  for (float& e : x) e *= inverse;
}

template <class X>
void step(const Op::Desc& d, const Op::Args& a, std::int64_t sequence, std::int64_t head,
          std::int64_t token, const State& state) {
  const GdnDesc heads = d.heads();
  const std::int64_t key_head = heads.key_head(head);
  std::vector<float> q = load(a.q.as<X>() + a.q.at(sequence, token, key_head), d.key_dim);
  std::vector<float> k = load(a.k.as<X>() + a.k.at(sequence, token, key_head), d.key_dim);
  if (d.qk_l2norm) {
    normalise(q);
    normalise(k);
  }
  for (float& e : q) e *= heads.query_scale();

  float g = a.g.as<float>()[a.g.at(sequence, token, head)];
  if (d.gate) {
    const float rate = -math::exp(a.a_log.as<float>()[head]);
    g = rate * math::softplus(g + a.dt_bias.as<float>()[head]);
  }
  const float decay = math::exp(g);
  float beta = a.beta.as<float>()[a.beta.at(sequence, token, head)];
  if (d.beta_sigmoid) beta = math::sigmoid(beta);
  if (d.allow_neg_eigval) beta = 2 * beta;

  const float kq = dot(k.data(), q.data(), d.key_dim);
  const X* v = a.v.as<X>() + a.v.at(sequence, token, head);
  X* o = a.o.as<X>() + a.o.at(sequence, token, head);
  for (std::int64_t j = 0; j < d.value_dim; ++j) {
    const float sk = column(d, state, k, j), sq = column(d, state, q, j);
    const float delta = beta * std::fma(-decay, sk, to_math(v[j]));
    o[j] = from_math<X>(std::fma(kq, delta, decay * sq));
    for (std::int64_t i = 0; i < d.key_dim; ++i) {
      float& s = state.at(i, j);
      s = std::fma(k[static_cast<std::size_t>(i)], delta, decay * s);
    }
  }
}

// What a sequence without a state gives.
void skip(const Op::Desc& d, const Op::Args& a, std::int64_t sequence) {
  const std::int64_t size = d.value_heads * d.key_dim * d.value_dim;
  for (std::int64_t token = 0; token < d.tokens; ++token) {
    for (std::int64_t head = 0; head < d.value_heads; ++head) {
      (void)visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
        std::fill_n(a.o.as<X>() + a.o.at(sequence, token, head), d.value_dim, from_math<X>(0.0f));
        return Status();
      });
    }
    if (a.snapshots)
      std::fill_n(a.snapshots.as<float>() + (sequence * d.tokens + token) * size, size, 0.0f);
  }
}

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  const bool key_first = d.state_layout == StateLayout::key_value;
  for (std::int64_t sequence = 0; sequence < d.batch; ++sequence) {
    const std::int64_t slot = d.pool > 0 ? a.state_index.as<std::int32_t>()[sequence] : sequence;
    if (slot < 0) {
      skip(d, a, sequence);
      continue;
    }
    for (std::int64_t head = 0; head < d.value_heads; ++head) {
      const std::int64_t row = a.state.stride[2];
      const State state{a.state.as<float>() + a.state.at(slot, head), key_first ? row : 1,
                        key_first ? 1 : row};
      for (std::int64_t token = 0; token < d.tokens; ++token) {
        BITTERN_TRY((visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
          step<X>(d, a, sequence, head, token, state);
          return Status();
        })));
        if (a.snapshots) {
          const Shape& shape = a.state.shape;
          float* to = a.snapshots.as<float>() + a.snapshots.at(sequence, token, head);
          for (std::int64_t r = 0; r < shape[2]; ++r)
            to = std::copy_n(state.data + r * row, shape[3], to);
        }
      }
    }
  }
  return {};
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<GdnRecurrentStep>> gdn_recurrent_step_ref() { return kKernels; }

}  // namespace bittern
