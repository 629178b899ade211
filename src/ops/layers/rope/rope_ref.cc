#include "bittern/ops/rope.h"
#include "core/numerics.h"
#include "core/rope.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = Rope;

template <class X>
void rotate(const Op::Desc& d, const Op::Args& a) {
  const std::int64_t half = d.rotary_dim / 2;
  const bool interleaved = d.layout == RopeLayout::interleaved;
  for (std::int64_t t = 0; t < d.tokens; ++t) {
    const std::int32_t position = a.positions.as<std::int32_t>()[t];
    for (std::int64_t h = 0; h < d.heads; ++h) {
      const X* x = a.x.as<X>() + a.x.at(t, h);
      X* y = a.y.as<X>() + a.y.at(t, h);
      for (std::int64_t i = 0; i < half; ++i) {
        const RopeTurn turn =
            rope_turn(position, a.inverse_frequencies.as<float>()[i], static_cast<float>(d.factor));
        const auto [first, second] = rope_pair(i, half, interleaved);
        const float x_a = to_math(x[first]), x_b = to_math(x[second]);
        y[first] = from_math<X>(turn.first(x_a, x_b));
        y[second] = from_math<X>(turn.second(x_a, x_b));
      }
      for (std::int64_t j = d.rotary_dim; j < d.dim; ++j) y[j] = x[j];
    }
  }
}

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  return visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    rotate<X>(d, a);
    return Status();
  });
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<Rope>> rope_ref() { return kKernels; }

}  // namespace bittern
