// Running the gated delta rule's ops in a test, on operands made by the oracle and then changed.
#pragma once
#include <gtest/gtest.h>

#include "cuda/plugin.h"
#include "ops/gdn/gdn_aims.h"
#include "oracle/op_test.h"
#include "oracle/oracle_impl.h"

namespace bittern::oracle {

template <class Op>
Status run_problem(Problem<Op>& p, std::string_view kernel = {},
                   Preference preference = Preference::exact, Device device = {}) {
  const auto plan = Plan<Op>::select(p.desc, device, preference, kernel);
  if (!plan) return plan.status();
  return run_on(device, p, plan->workspace_bytes(),
                [&](const auto& args, Workspace w) { return plan->run(args, {}, w); });
}

// ---- kernels for warpgroups ----

inline constexpr Device kGpu{Device::Type::cuda, 0};

template <class Op>
Result<Plan<Op>> select_wgmma(const GdnDesc& d) {
  return Plan<Op>::select(d, kGpu, Preference::fastest, "cuda_wgmma");
}
template <class Op>
Status run_wgmma(Problem<Op>& p) {
  return run_problem(p, "cuda_wgmma", Preference::fastest, kGpu);
}
inline GdnDesc wgmma_desc(std::int64_t tokens, std::int64_t key_heads, std::int64_t value_heads) {
  GdnDesc d{.tokens = tokens, .key_heads = key_heads, .value_heads = value_heads};
  d.element = DType::bf16;
  return d;
}
// Keys and values of all sizes that tensor cores take, in a head that is cut into segments (the
// emulated device has few multiprocessors) and in several that are not.
inline std::vector<GdnDesc> wgmma_sizes() {
  CudaDeviceInfo device;
  expect_ok((*cuda_plugin(0))->info(0, &device));
  GdnDesc one = wgmma_desc(device.name == "emulated" ? 270 : 2670, 1, 1);
  one.state_layout = StateLayout::value_key;
  std::vector<GdnDesc> all;
  for (const auto& [keys, values] : gdn_tensor_core_sizes()) {
    for (GdnDesc d : {one, wgmma_desc(150, 2, 4)}) {
      d.key_dim = keys;
      d.value_dim = values;
      all.push_back(d);
    }
  }
  return all;
}
inline std::string sizes_text(const GdnDesc& d) {
  return std::to_string(d.key_dim) + "/" + std::to_string(d.value_dim) + ", " +
         std::to_string(d.value_heads) + " heads";
}

template <class V>
std::vector<double> values(const V& view) {
  std::vector<double> all;
  if (!view) return all;  // left out
  for (std::int64_t i = 0; i < view.shape.numel(); ++i) all.push_back(get(view, i));
  return all;
}

template <class V>
void set_all(const V& view, double value) {
  for (std::int64_t i = 0; i < view.shape.numel(); ++i) put(view, i, value);
}

template <class V>
void set_values(const V& view, const std::vector<double>& to) {
  ASSERT_EQ(view.shape.numel(), static_cast<std::int64_t>(to.size()));
  for (std::size_t i = 0; i < to.size(); ++i) put(view, static_cast<std::int64_t>(i), to[i]);
}

// ---- the rule itself, in f64, token by token ----

// What the rule is about, after any normalisation, gate and sigmoid.
struct GdnValues {
  std::vector<double> q, k, v, g, beta, initial_state;  // the last may be empty: zeros
};
struct GdnResult {
  std::vector<double> o, final_state;  // states [sequences, heads, key_dim, value_dim]
};

// S = e^g S;  S = S + k (beta (v - S^T k))^T;  o = S^T (scale q)
inline GdnResult gdn_recurrence(const GdnDesc& d, const std::vector<std::int64_t>& starts,
                                const GdnValues& x) {
  const auto kd = static_cast<std::size_t>(d.key_dim), vd = static_cast<std::size_t>(d.value_dim);
  const auto heads = static_cast<std::size_t>(d.value_heads);
  const double scale = d.scale != 0 ? d.scale : 1 / std::sqrt(static_cast<double>(d.key_dim));
  GdnResult r;
  r.o.assign(x.v.size(), 0);
  for (std::size_t n = 0; n + 1 < starts.size(); ++n) {
    for (std::size_t h = 0; h < heads; ++h) {
      std::vector<double> state(kd * vd);
      if (!x.initial_state.empty()) {
        const auto first =
            x.initial_state.begin() + static_cast<std::ptrdiff_t>((n * heads + h) * kd * vd);
        std::copy_n(first, kd * vd, state.begin());
      }
      for (std::int64_t t = starts[n]; t < starts[n + 1]; ++t) {
        const auto token = static_cast<std::size_t>(t);
        const std::size_t value = token * heads + h;
        const std::size_t key =
            (token * static_cast<std::size_t>(d.key_heads) +
             static_cast<std::size_t>(d.key_head(static_cast<std::int64_t>(h)))) *
            kd;
        for (double& s : state) s *= std::exp(x.g[value]);
        for (std::size_t j = 0; j < vd; ++j) {
          double seen = 0;
          for (std::size_t i = 0; i < kd; ++i) seen += state[i * vd + j] * x.k[key + i];
          const double delta = x.beta[value] * (x.v[value * vd + j] - seen);
          double o = 0;
          for (std::size_t i = 0; i < kd; ++i) {
            state[i * vd + j] += x.k[key + i] * delta;
            o += state[i * vd + j] * x.q[key + i];
          }
          r.o[value * vd + j] = scale * o;
        }
      }
      r.final_state.insert(r.final_state.end(), state.begin(), state.end());
    }
  }
  return r;
}

// Its gradient, from d_o and d_final_state (keys first), by the reverse of the same recurrence: no
// difference of sums over tokens is taken.
struct GdnGradients {
  std::vector<double> q, k, v, g, beta, initial_state;
  // Of each token and head the most that its gradients may come to, by the sizes of the factors
  // they are products of: rounding is measured against that.
  std::vector<double> q_size, k_size, v_size, g_size, beta_size;
};

inline GdnGradients gdn_reverse(const GdnDesc& d, const std::vector<std::int64_t>& starts,
                                const GdnValues& x, const std::vector<double>& d_o,
                                const std::vector<double>& d_final_state) {
  const auto kd = static_cast<std::size_t>(d.key_dim), vd = static_cast<std::size_t>(d.value_dim);
  const auto heads = static_cast<std::size_t>(d.value_heads);
  const double scale = d.scale != 0 ? d.scale : 1 / std::sqrt(static_cast<double>(d.key_dim));
  GdnGradients r;
  r.q.assign(x.q.size(), 0);
  r.k.assign(x.k.size(), 0);
  r.v.assign(x.v.size(), 0);
  r.g.assign(x.g.size(), 0);
  r.beta = r.q_size = r.k_size = r.v_size = r.g_size = r.beta_size = r.g;
  r.initial_state.assign((starts.size() - 1) * heads * kd * vd, 0);
  const auto size = [](const std::vector<double>& v, std::size_t begin, std::size_t count) {
    double sum = 0;
    for (std::size_t i = begin; i < begin + count; ++i) sum += v[i] * v[i];
    return std::sqrt(sum);
  };
  for (std::size_t n = 0; n + 1 < starts.size(); ++n) {
    for (std::size_t h = 0; h < heads; ++h) {
      const std::size_t first = (n * heads + h) * kd * vd;
      std::vector<double> state(kd * vd);
      if (!x.initial_state.empty())
        std::copy_n(x.initial_state.begin() + static_cast<std::ptrdiff_t>(first), kd * vd,
                    state.begin());
      std::vector<std::vector<double>> decayed, rest, after;  // of each token: e^g S, v - k S, S
      for (std::int64_t t = starts[n]; t < starts[n + 1]; ++t) {
        const std::size_t value = static_cast<std::size_t>(t) * heads + h;
        const std::size_t key =
            static_cast<std::size_t>(t * d.key_heads + d.key_head(static_cast<std::int64_t>(h))) *
            kd;
        for (double& s : state) s *= std::exp(x.g[value]);
        decayed.push_back(state);
        std::vector<double>& left = rest.emplace_back(vd);
        for (std::size_t j = 0; j < vd; ++j) {
          left[j] = x.v[value * vd + j];
          for (std::size_t i = 0; i < kd; ++i) left[j] -= decayed.back()[i * vd + j] * x.k[key + i];
          for (std::size_t i = 0; i < kd; ++i)
            state[i * vd + j] += x.k[key + i] * x.beta[value] * left[j];
        }
        after.push_back(state);
      }
      std::vector<double> grad(kd * vd);
      if (!d_final_state.empty())
        std::copy_n(d_final_state.begin() + static_cast<std::ptrdiff_t>(first), kd * vd,
                    grad.begin());
      for (std::int64_t t = starts[n + 1]; t-- > starts[n];) {
        const auto at = static_cast<std::size_t>(t - starts[n]);
        const std::size_t value = static_cast<std::size_t>(t) * heads + h;
        const std::size_t key =
            static_cast<std::size_t>(t * d.key_heads + d.key_head(static_cast<std::int64_t>(h))) *
            kd;
        const double beta = x.beta[value];
        for (std::size_t i = 0; i < kd; ++i)
          for (std::size_t j = 0; j < vd; ++j) {
            r.q[key + i] += scale * after[at][i * vd + j] * d_o[value * vd + j];
            grad[i * vd + j] += scale * x.q[key + i] * d_o[value * vd + j];
          }
        const double grad_size = size(grad, 0, kd * vd), old_size = size(decayed[at], 0, kd * vd);
        r.q_size[value] = scale * size(after[at], 0, kd * vd) * size(d_o, value * vd, vd);
        r.v_size[value] = beta * size(x.k, key, kd) * grad_size;
        r.g_size[value] = old_size * grad_size;
        for (std::size_t j = 0; j < vd; ++j) {
          double to = 0;
          for (std::size_t i = 0; i < kd; ++i) to += x.k[key + i] * grad[i * vd + j];
          r.beta[value] += to * rest[at][j];
          r.v[value * vd + j] = beta * to;
          for (std::size_t i = 0; i < kd; ++i) {
            double& s = grad[i * vd + j];
            r.k[key + i] += s * beta * rest[at][j] - beta * to * decayed[at][i * vd + j];
            s -= x.k[key + i] * beta * to;
            r.g[value] += s * decayed[at][i * vd + j];
          }
        }
        const double write_size = size(x.v, value * vd, vd) + old_size;
        r.beta_size[value] = size(x.k, key, kd) * grad_size * write_size;
        r.k_size[value] = beta * grad_size * write_size;
        for (double& s : grad) s *= std::exp(x.g[value]);
      }
      std::copy_n(grad.begin(), kd * vd,
                  r.initial_state.begin() + static_cast<std::ptrdiff_t>(first));
    }
  }
  return r;
}

// Log decays of a chunk that is mostly mild, with one token in 8 at `strong`: at regular places, or
// by chance.
inline void fill_strong(const ConstView& g, std::int64_t heads, double strong, bool regular,
                        Rng& rng) {
  for (std::int64_t i = 0; i < g.shape.numel(); ++i) {
    const bool here = regular ? i / heads % 8 == 3 : rng.chance(8);
    put(g, i, here ? strong : -0.3 * rng.uniform());
  }
}

// The largest relative error of rows of `width`: of each, the root of the squares.
inline double worst_row(const std::vector<double>& got, const std::vector<double>& want,
                        std::int64_t width) {
  EXPECT_EQ(got.size(), want.size());
  const auto n = static_cast<std::size_t>(width);
  double worst = 0;
  for (std::size_t row = 0; row < got.size(); row += n) {
    double error = 0, size = 0;
    for (std::size_t i = row; i < row + n; ++i) {
      error += (got[i] - want[i]) * (got[i] - want[i]);
      size += want[i] * want[i];
    }
    if (!(error == 0)) worst = std::max(worst, size > 0 ? std::sqrt(error / size) : 1.0);
    if (std::isnan(error)) return error;
  }
  return worst;
}

// The largest error of rows of `width`, root of the squares, against each row's size.
inline double worst_error(const std::vector<double>& got, const std::vector<double>& want,
                          std::int64_t width, const std::vector<double>& sizes) {
  EXPECT_EQ(got.size(), want.size());
  EXPECT_EQ(got.size(), sizes.size() * static_cast<std::size_t>(width));
  double worst = 0;
  for (std::size_t row = 0; row < sizes.size(); ++row) {
    double error = 0;
    for (std::size_t i = row * static_cast<std::size_t>(width);
         i < (row + 1) * static_cast<std::size_t>(width); ++i)
      error += (got[i] - want[i]) * (got[i] - want[i]);
    // Below the least normal number f32 has fewer bits.
    const double relative = std::sqrt(error) / std::max(sizes[row], 0x1p-110);
    if (!(relative <= worst)) worst = relative;
    if (std::isnan(worst)) return worst;
  }
  return worst;
}

// Where the sequences start, and the end: of equal rows, or as given.
inline std::vector<std::int64_t> gdn_starts(const GdnDesc& d, const ConstView& cu_seqlens) {
  std::vector<std::int64_t> starts;
  for (std::int64_t i = 0; i <= d.sequence_count(); ++i)
    starts.push_back(d.sequences > 0 ? cu_seqlens.as<std::int32_t>()[i] : i * d.tokens);
  return starts;
}

// Unit keys and queries, a fraction of each key the same for all tokens; ordinary values.
inline void fill_keys(const GdnDesc& d, const ConstView& x, double common, Rng& rng) {
  const std::int64_t n = x.shape.numel() / d.key_dim;
  std::vector<double> shared(static_cast<std::size_t>(d.key_dim)), key = shared;
  for (double& s : shared) s = rng.normal();
  for (std::int64_t i = 0; i < n; ++i) {
    double squares = 0;
    for (std::size_t j = 0; j < key.size(); ++j) {
      key[j] = std::sqrt(common) * shared[j] + std::sqrt(1 - common) * rng.normal();
      squares += key[j] * key[j];
    }
    for (std::size_t j = 0; j < key.size(); ++j)
      put(x, i * d.key_dim + static_cast<std::int64_t>(j), key[j] / std::sqrt(squares));
  }
}
inline void fill_normal(const ConstView& x, Rng& rng) {
  for (std::int64_t i = 0; i < x.shape.numel(); ++i) put(x, i, rng.normal());
}
inline void fill_uniform(const ConstView& x, double low, double high, Rng& rng) {
  for (std::int64_t i = 0; i < x.shape.numel(); ++i) put(x, i, low + (high - low) * rng.uniform());
}

// sum (got - want)^2 / sum want^2; its root is the ratio of root mean squares.
inline double nmse(const std::vector<double>& got, const std::vector<double>& want) {
  EXPECT_EQ(got.size(), want.size());
  double error = 0, size = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    error += (got[i] - want[i]) * (got[i] - want[i]);
    size += want[i] * want[i];
  }
  return error / size;
}
inline double rms_ratio(const std::vector<double>& got, const std::vector<double>& want) {
  return std::sqrt(nmse(got, want));
}

// A state tensor with keys first, whatever its layout.
inline std::vector<double> keys_first(const GdnDesc& d, const std::vector<double>& states) {
  if (d.state_layout == StateLayout::key_value) return states;
  const auto kd = static_cast<std::size_t>(d.key_dim), vd = static_cast<std::size_t>(d.value_dim);
  std::vector<double> turned(states.size());
  for (std::size_t s = 0; s < states.size(); s += kd * vd)
    for (std::size_t i = 0; i < kd; ++i)
      for (std::size_t j = 0; j < vd; ++j) turned[s + i * vd + j] = states[s + j * kd + i];
  return turned;
}

}  // namespace bittern::oracle
