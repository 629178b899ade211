// The delta rule token by token in plain form.
#pragma once
#include <cmath>
#include <cstdint>
#include <vector>

#include "bittern/gdn_desc.h"
#include "core/dot.h"
#include "core/numerics.h"
#include "ops/gdn/gdn.h"

namespace bittern {

// The state that a sequence uses; below 0: none, it is skipped.
inline std::int64_t gdn_slot(const GdnStepDesc& d, const ConstView& state_index,
                             std::int64_t sequence) {
  return d.pool > 0 ? state_index.as<std::int32_t>()[sequence] : sequence;
}

// One head's state, in either layout.
struct GdnState {
  float* data;
  std::int64_t row;  // elements to the next one
  StateLayout layout;

  GdnState(const GdnStepDesc& d, const MutView& state, std::int64_t slot, std::int64_t head)
      : data(state.as<float>() + state.at(slot, head)),
        row(state.stride[2]),
        layout(d.state_layout) {}
  // Key i and value j.
  float& at(std::int64_t i, std::int64_t j) const {
    return layout == StateLayout::key_value ? data[i * row + j] : data[j * row + i];
  }
  // S^T x for column j.
  float column(const std::vector<float>& x, std::int64_t j) const {
    const auto keys = static_cast<std::int64_t>(x.size());
    if (layout == StateLayout::value_key) return dot(&at(0, j), x.data(), keys);
    float sum = 0;
    for (std::int64_t i = 0; i < keys; ++i)
      sum = std::fma(at(i, j), x[static_cast<std::size_t>(i)], sum);
    return sum;
  }
  // Dense, to the snapshots, if there are any.
  void copy(const MutView& snapshots, std::int64_t sequence, std::int64_t token,
            std::int64_t head) const {
    if (!snapshots) return;
    float* to = snapshots.as<float>() + snapshots.at(sequence, token, head);
    for (std::int64_t r = 0; r < snapshots.shape[3]; ++r)
      to = std::copy_n(data + r * row, snapshots.shape[4], to);
  }
};

template <class X>
std::vector<float> gdn_load(const X* from, std::int64_t n) {
  std::vector<float> x;
  for (std::int64_t i = 0; i < n; ++i) x.push_back(to_math(from[i]));
  return x;
}

inline void gdn_normalise(std::vector<float>& x) {
  const float squares = dot(x.data(), x.data(), static_cast<std::int64_t>(x.size()));
  const float inverse = 1.0f / std::sqrt(squares + 1e-6f);
  for (float& e : x) e *= inverse;
}

// A token as one head sees it: what the op is given, widened.
struct GdnToken {
  std::vector<float> q, k, v;
  float g, beta, a_log = 0, dt_bias = 0;
};

// Changes the state and returns o.
inline std::vector<float> gdn_step(const GdnStepDesc& d, GdnToken t, const GdnState& state) {
  const GdnDesc heads = d.heads();
  if (d.qk_l2norm) {
    gdn_normalise(t.q);
    gdn_normalise(t.k);
  }
  for (float& e : t.q) e *= heads.query_scale();
  const float decay = math::exp(d.gate ? gdn_log_decay(t.g, t.a_log, t.dt_bias) : t.g);
  const float beta = gdn_strength(heads, t.beta);
  const float kq = dot(t.k.data(), t.q.data(), d.key_dim);
  std::vector<float> o;
  for (std::int64_t j = 0; j < d.value_dim; ++j) {
    const float sk = state.column(t.k, j), sq = state.column(t.q, j);
    const float delta = beta * std::fma(-decay, sk, t.v[static_cast<std::size_t>(j)]);
    o.push_back(std::fma(kq, delta, decay * sq));
    for (std::int64_t i = 0; i < d.key_dim; ++i) {
      float& s = state.at(i, j);
      s = std::fma(t.k[static_cast<std::size_t>(i)], delta, decay * s);
    }
  }
  return o;
}

}  // namespace bittern
