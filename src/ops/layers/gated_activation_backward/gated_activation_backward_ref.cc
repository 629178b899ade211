#include "bittern/ops/gated_activation_backward.h"
#include "core/activations.h"
#include "core/numerics.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = GatedActivationBackward;

struct ValueAndSlope {
  float value, slope;
};

ValueAndSlope activation(GatedKind kind, float x) {
  switch (kind) {
    case GatedKind::geglu_tanh:
      return {math::gelu_tanh(x), math::gelu_tanh_slope(x, math::gelu_tanh_gate(x))};
    case GatedKind::geglu_erf: return {math::gelu(x), math::gelu_slope(x, math::gelu_parts(x))};
    default: return {math::silu(x), math::silu_slope(x)};
  }
}

template <class X>
void differentiate(const Op::Desc& d, const Op::Args& a) {
  for (std::int64_t i = 0; i < d.rows; ++i) {
    const X* d_y = a.d_y.as<X>() + i * a.d_y.row_stride();
    const X* gate = a.gate.as<X>() + i * a.gate.row_stride();
    const X* up = a.up.as<X>() + i * a.up.row_stride();
    for (std::int64_t j = 0; j < d.dim; ++j) {
      const ValueAndSlope f = activation(d.kind, to_math(gate[j]));
      const float d_gate = (to_math(d_y[j]) * to_math(up[j])) * f.slope;
      const float d_up = to_math(d_y[j]) * f.value;
      if (a.d_gate) a.d_gate.as<X>()[i * a.d_gate.row_stride() + j] = from_math<X>(d_gate);
      if (a.d_up) a.d_up.as<X>()[i * a.d_up.row_stride() + j] = from_math<X>(d_up);
    }
  }
}

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  return visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    differentiate<X>(d, a);
    return Status();
  });
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<GatedActivationBackward>> gated_activation_backward_ref() {
  return kKernels;
}

}  // namespace bittern
