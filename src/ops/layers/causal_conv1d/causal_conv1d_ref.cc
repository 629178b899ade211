#include "bittern/ops/causal_conv1d.h"
#include "ops/layers/conv.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = CausalConv1d;

template <class X>
void convolve(const Op::Desc& d, const Op::Args& a) {
  const ConvInput<X> in{d, a.x, a.weight, a.bias, a.initial_state, a.mask};
  for (const ConvBlock& block : conv_blocks(d, a.cu_seqlens)) {
    const ConvSequence& s = block.sequence;
    for (std::int64_t t = block.first; t < block.first + block.rows; ++t) {
      if (!a.y) break;
      X* y = a.y.as<X>() + conv_at(d, a.y, s, t);
      for (std::int64_t c = 0; c < d.channels; ++c) {
        if (conv_masked(a.mask, s.begin + t)) {
          y[c] = from_math<X>(0);
          continue;
        }
        const float u = in.u(s, t, c);
        y[c] = from_math<X>(d.silu ? math::silu(u) : u);
      }
    }
    if (!block.last || !a.final_state) continue;
    for (std::int64_t c = 0; c < d.channels; ++c) {
      for (std::int64_t i = 0; i < d.width - 1; ++i)
        a.final_state.as<X>()[a.final_state.at(s.index, c, i)] =
            from_math<X>(in.input(s, s.length - (d.width - 1) + i, c));
    }
  }
}

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  return visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    convolve<X>(d, a);
    return Status();
  });
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<CausalConv1d>> causal_conv1d_ref() { return kKernels; }

}  // namespace bittern
