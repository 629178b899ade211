#include "bittern/ops/gdn_decode_step.h"
#include "ops/gdn/gdn_step.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = GdnDecodeStep;

// silu of the convolution at one token, and conv_state moved on by it.
template <class X>
std::vector<float> convolve(const Op::Desc& d, const Op::Args& a, std::int64_t sequence,
                            std::int64_t token, std::int64_t slot) {
  std::vector<float> mixed;
  const X* x = a.x.as<X>() + a.x.at(sequence, token);
  for (std::int64_t c = 0; c < d.channels(); ++c) {
    const auto state = [&](std::int64_t i) -> X& {
      return a.conv_state.as<X>()[a.conv_state.at(slot, c, i)];
    };
    const X* weight = a.conv_weight.as<X>() + c * d.width;
    float u = a.conv_bias ? to_math(a.conv_bias.as<X>()[c]) : 0.0f;
    for (std::int64_t j = 0; j < d.width - 1; ++j)
      u = std::fma(to_math(weight[j]), to_math(state(j)), u);
    u = std::fma(to_math(weight[d.width - 1]), to_math(x[c]), u);
    mixed.push_back(to_math(from_math<X>(math::silu(u))));
    for (std::int64_t j = 0; j + 1 < d.width - 1; ++j) state(j) = state(j + 1);
    state(d.width - 2) = x[c];
    if (!a.conv_snapshots) continue;
    X* to = a.conv_snapshots.as<X>() + a.conv_snapshots.at(sequence, token, c);
    for (std::int64_t j = 0; j < d.width - 1; ++j) to[j] = state(j);
  }
  return mixed;
}

// y of one head from its o.
template <class X>
void normalise(const Op::Desc& d, const Op::Args& a, std::int64_t sequence, std::int64_t token,
               std::int64_t head, std::vector<float> o) {
  const auto rounded = [&](float v) {
    return d.rounding == NormRounding::each ? to_math(from_math<X>(v)) : v;
  };
  for (float& e : o) e = to_math(from_math<X>(e));
  const float mean = dot(o.data(), o.data(), d.value_dim) / static_cast<float>(d.value_dim);
  const float rstd = 1.0f / std::sqrt(mean + static_cast<float>(d.eps));
  const X* z = a.z.as<X>() + a.z.at(sequence, token, head);
  X* y = a.y.as<X>() + a.y.at(sequence, token, head);
  for (std::int64_t j = 0; j < d.value_dim; ++j) {
    const float n = rounded(o[static_cast<std::size_t>(j)] * rstd);
    const float weighted = rounded(n * to_math(a.norm_weight.as<X>()[j]));
    y[j] = from_math<X>(weighted * math::silu(to_math(z[j])));
  }
}

template <class X>
void step(const Op::Desc& d, const Op::Args& a, std::int64_t sequence, std::int64_t token,
          std::int64_t slot) {
  const std::vector<float> mixed = convolve<X>(d, a, sequence, token, slot);
  const auto channels = [&](std::int64_t first, std::int64_t count) {
    const float* from = mixed.data() + first;
    return std::vector<float>(from, from + count);
  };
  for (std::int64_t head = 0; head < d.value_heads; ++head) {
    const std::int64_t key_head = d.step().heads().key_head(head);
    const GdnToken t{.q = channels(d.q_channel(key_head), d.key_dim),
                     .k = channels(d.k_channel(key_head), d.key_dim),
                     .v = channels(d.v_channel(head), d.value_dim),
                     .g = to_math(a.g.as<X>()[a.g.at(sequence, token, head)]),
                     .beta = to_math(a.beta.as<X>()[a.beta.at(sequence, token, head)]),
                     .a_log = a.a_log.as<float>()[head],
                     .dt_bias = a.dt_bias.as<float>()[head]};
    const GdnState state(d.step(), a.state, slot, head);
    normalise<X>(d, a, sequence, token, head, gdn_step(d.step(), t, state));
    state.copy(a.snapshots, sequence, token, head);
  }
}

// What a token of a sequence without a state gives.
template <class X>
void skip(const Op::Desc& d, const Op::Args& a, std::int64_t sequence, std::int64_t token) {
  for (std::int64_t head = 0; head < d.value_heads; ++head)
    std::fill_n(a.y.as<X>() + a.y.at(sequence, token, head), d.value_dim, from_math<X>(0.0f));
  if (a.snapshots)
    std::fill_n(a.snapshots.as<float>() + a.snapshots.at(sequence, token),
                d.value_heads * d.key_dim * d.value_dim, 0.0f);
  if (a.conv_snapshots)
    std::fill_n(a.conv_snapshots.as<X>() + a.conv_snapshots.at(sequence, token),
                d.channels() * (d.width - 1), from_math<X>(0.0f));
}

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  return visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    for (std::int64_t sequence = 0; sequence < d.batch; ++sequence) {
      const std::int64_t slot = gdn_slot(d.step(), a.state_index, sequence);
      for (std::int64_t token = 0; token < d.tokens; ++token) {
        if (slot < 0) {
          skip<X>(d, a, sequence, token);
        } else {
          step<X>(d, a, sequence, token, slot);
        }
      }
    }
    return Status();
  });
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<GdnDecodeStep>> gdn_decode_step_ref() { return kKernels; }

}  // namespace bittern
