#include "bittern/ops/causal_conv1d_backward.h"
#include "core/numerics.h"
#include "ops/layers/conv.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = CausalConv1dBackward;

template <class X>
struct Gradients {
  const Op::Desc& d;
  const Op::Args& a;
  ConvInput<X> in{d, a.x, a.weight, a.bias, a.initial_state, a.mask};

  // Of all positions of a sequence.
  std::vector<float> d_u(const ConvSequence& s, std::int64_t c) const {
    std::vector<float> out;
    for (std::int64_t t = 0; t < s.length; ++t) {
      if (conv_masked(a.mask, s.begin + t)) {
        out.push_back(0);
        continue;
      }
      const float d_y = to_math(a.d_y.as<X>()[conv_at(d, a.d_y, s, t) + c]);
      out.push_back(d.silu ? d_y * math::silu_slope(in.u(s, t, c)) : d_y);
    }
    return out;
  }
  float d_x(const ConvSequence& s, const std::vector<float>& d_u, std::int64_t t,
            std::int64_t c) const {
    if (t >= 0 && conv_masked(a.mask, s.begin + t)) return 0;
    float sum = 0;
    for (std::int64_t j = 0; j < d.width; ++j) {
      const std::int64_t at = t + d.width - 1 - j;
      const bool inside = at >= 0 && at < s.length;
      sum = std::fma(in.tap(c, j), inside ? d_u[static_cast<std::size_t>(at)] : 0.0f, sum);
    }
    const std::int64_t i = t - (s.length - (d.width - 1));
    if (i >= 0 && a.d_final_state)
      sum += to_math(a.d_final_state.as<X>()[a.d_final_state.at(s.index, c, i)]);
    return sum;
  }

  void of_channel(const std::vector<ConvBlock>& blocks, std::int64_t c) const {
    std::vector<float> weight_terms[4], bias_terms, g;
    for (const ConvBlock& block : blocks) {
      const ConvSequence& s = block.sequence;
      if (block.first == 0) {
        g = d_u(s, c);
        for (std::int64_t i = 0; a.d_initial_state && i < d.width - 1; ++i)
          a.d_initial_state.as<X>()[a.d_initial_state.at(s.index, c, i)] =
              from_math<X>(d_x(s, g, i - (d.width - 1), c));
      }
      if (block.rows == 0) continue;
      float weight_sum[4] = {}, bias_sum = 0;
      for (std::int64_t t = block.first; t < block.first + block.rows; ++t) {
        const float at_t = g[static_cast<std::size_t>(t)];
        for (std::int64_t j = 0; j < d.width; ++j)
          weight_sum[j] = std::fma(at_t, in.input(s, t - d.width + 1 + j, c), weight_sum[j]);
        bias_sum += at_t;
        if (a.d_x) a.d_x.as<X>()[conv_at(d, a.d_x, s, t) + c] = from_math<X>(d_x(s, g, t, c));
      }
      for (std::int64_t j = 0; j < d.width; ++j) weight_terms[j].push_back(weight_sum[j]);
      bias_terms.push_back(bias_sum);
    }
    for (std::int64_t j = 0; a.d_weight && j < d.width; ++j)
      a.d_weight.as<X>()[c * d.width + j] = from_math<X>(halving_sum(weight_terms[j]));
    if (a.d_bias) a.d_bias.as<X>()[c] = from_math<X>(halving_sum(bias_terms));
  }
};

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  return visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    const Gradients<X> gradients{d, a};
    const std::vector<ConvBlock> blocks = conv_blocks(d, a.cu_seqlens);
    for (std::int64_t c = 0; c < d.channels; ++c) gradients.of_channel(blocks, c);
    return Status();
  });
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<CausalConv1dBackward>> causal_conv1d_backward_ref() { return kKernels; }

}  // namespace bittern
