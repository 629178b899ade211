#include "ops/layers/conv.h"
#include "ops/layers/layers_aims.h"

namespace bittern::oracle {

// Two of three: with ten optional operands each is run in many layouts.
std::vector<CausalConvDesc> causal_conv1d_backward_check_cases() {
  std::vector<CausalConvDesc> cases = causal_conv_cases(), some;
  for (std::size_t i = 0; i < cases.size(); ++i)
    if (i % 3 != 1) some.push_back(cases[i]);
  return some;
}

std::vector<BenchCase<CausalConvDesc>> causal_conv1d_backward_bench_cases() {
  const CausalConvDesc bf16{.tokens = 4096, .channels = 8192, .element = DType::bf16};
  CausalConvDesc f32 = bf16, large = bf16;
  f32.element = DType::f32;
  large.tokens = 32768;
  const char* plain = "bias initial_state d_final_state mask cu_seqlens d_bias d_initial_state";
  return {{"bf16 4096 x 8192", bf16, nullptr, plain},
          {"f32 4096 x 8192", f32, nullptr, plain},
          {.label = "bf16 32768 x 8192", .desc = large, .left_out = plain, .gpu_only = true},
          {.label = "bf16 32768 x 8192, fastest",
           .desc = large,
           .left_out = plain,
           .preference = Preference::fastest,
           .gpu_only = true}};
}

std::vector<CausalConvDesc> causal_conv1d_backward_bounded_cases(bool on_cuda) {
  std::vector<CausalConvDesc> cases;
  if (!on_cuda) return cases;
  for (const CausalConvDesc& d : causal_conv_cases())
    if (d.silu && d.channels % 8 == 0 && d.batch * d.tokens > 0) cases.push_back(d);
  cases.push_back({.batch = 2, .tokens = 200, .channels = 16, .element = DType::f16});
  cases.push_back({.tokens = 8200, .channels = 4, .sequences = 3, .element = DType::bf16});
  cases.push_back({.batch = 2, .tokens = 8200, .channels = 4});
  return cases;
}

// The sums of the op's header, of magnitudes.
template <class X>
void judge_conv(const CausalConvDesc& d, const CausalConv1dBackward::Args& got,
                const CausalConv1dBackward::Args& want, Judge& judge) {
  const ConvInput<X> in{d, want.x, want.weight, want.bias, want.initial_state, want.mask};
  const auto width = static_cast<std::int64_t>(d.width);
  const auto value = [&](const char* name, const MutView& out, const MutView& ref, std::int64_t at,
                         double unit) {
    if (!out) return;
    if (unit >= 0x1p127) unit = std::numeric_limits<double>::infinity();
    judge.value(name, as_const(out), as_const(ref), at, unit);
  };
  for (std::int64_t c = 0; c < d.channels; ++c) {
    double weight_unit[4] = {}, bias_unit = 0;
    for (const ConvBlock& block : conv_blocks(d, want.cu_seqlens)) {
      if (block.first != 0) continue;
      const ConvSequence& s = block.sequence;
      std::vector<double> d_u;
      for (std::int64_t t = 0; t < s.length; ++t) {
        double unit = 0;
        if (!conv_masked(want.mask, s.begin + t)) {
          const double u = in.u(s, t, c), slope = 1 / (1 + std::exp(-u));
          const double d_y = to_math(want.d_y.as<X>()[conv_at(d, want.d_y, s, t) + c]);
          unit = std::fabs(d_y) * std::max(slope, 0x1p-100) * (1 + std::fabs(u) * (1 - slope));
        }
        d_u.push_back(unit);
        bias_unit += unit;
        for (std::int64_t j = 0; j < width; ++j)
          weight_unit[j] += unit * std::fabs(in.input(s, t - width + 1 + j, c));
      }
      for (std::int64_t t = 1 - width; t < s.length; ++t) {
        double unit = 0;
        for (std::int64_t j = 0; j < width; ++j) {
          const std::int64_t at = t + width - 1 - j;
          if (at >= 0 && at < s.length)
            unit += std::fabs(in.tap(c, j)) * d_u[static_cast<std::size_t>(at)];
        }
        const std::int64_t held = t - (s.length - (width - 1));
        if (held >= 0 && want.d_final_state)
          unit += std::fabs(
              to_math(want.d_final_state.as<X>()[want.d_final_state.at(s.index, c, held)]));
        if (t < 0) {
          value("d_initial_state", got.d_initial_state, want.d_initial_state,
                (s.index * d.channels + c) * (width - 1) + t + width - 1, unit);
        } else {
          value("d_x", got.d_x, want.d_x, (s.begin + t) * d.channels + c, unit);
        }
      }
    }
    for (std::int64_t j = 0; j < width; ++j)
      value("d_weight", got.d_weight, want.d_weight, c * width + j, weight_unit[j]);
    value("d_bias", got.d_bias, want.d_bias, c, bias_unit);
  }
}
void causal_conv1d_backward_judge(const CausalConvDesc& d, const CausalConv1dBackward::Args& got,
                                  const CausalConv1dBackward::Args& want, Judge& judge) {
  (void)visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    judge_conv<X>(d, got, want, judge);
    return Status();
  });
}

// One NaN would hide every other fault of a sum, so all but a few problems are finite.
void causal_conv1d_backward_aim(const CausalConvDesc& d, const CausalConv1dBackward::Args& a,
                                Rng& rng) {
  aim_sequences(d.rows(), a.cu_seqlens, rng);
  aim_mask(a.mask, rng);
  aim_gradient(a.d_y, rng);
  if (rng.chance(6)) return;
  for (const ConstView& v : {a.x, a.weight, a.bias, a.initial_state, a.d_final_state}) {
    for (std::int64_t i = 0; v && i < v.shape.numel(); ++i)
      if (!(std::fabs(get(v, i)) < 1e6)) put(v, i, rng.normal());
  }
}

}  // namespace bittern::oracle
