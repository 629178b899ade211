#include "bittern/ops/gated_activation.h"
#include "core/activations.h"
#include "core/numerics.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = GatedActivation;

float activation(GatedKind kind, float gate) {
  switch (kind) {
    case GatedKind::geglu_tanh: return math::gelu_tanh(gate);
    case GatedKind::geglu_erf: return math::gelu(gate);
    default: return math::silu(gate);
  }
}

template <class X>
void activate(const Op::Desc& d, const Op::Args& a) {
  for (std::int64_t i = 0; i < d.rows; ++i) {
    const X* gate = a.gate.as<X>() + i * a.gate.row_stride();
    const X* up = a.up.as<X>() + i * a.up.row_stride();
    X* y = a.y.as<X>() + i * a.y.row_stride();
    for (std::int64_t j = 0; j < d.dim; ++j) {
      float g = activation(d.kind, to_math(gate[j]));
      if (d.rounding == NormRounding::each) g = to_math(from_math<X>(g));
      y[j] = from_math<X>(g * to_math(up[j]));
    }
  }
}

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  return visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    activate<X>(d, a);
    return Status();
  });
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<GatedActivation>> gated_activation_ref() { return kKernels; }

}  // namespace bittern
