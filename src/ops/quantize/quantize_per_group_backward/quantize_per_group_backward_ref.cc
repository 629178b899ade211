#include "bittern/ops/quantize_per_group_backward.h"
#include "core/numerics.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = QuantizePerGroupBackward;

template <class X, class S>
void backward(const Op::Desc& d, const Op::Args& a) {
  using F = Math<X>;
  const GroupGeometry g = d.geometry();
  const std::int32_t* zero_point = a.zero_point.as<std::int32_t>();
  for (std::int64_t i = 0; i < g.rows; ++i) {
    const X* d_y = a.d_y.as<X>() + i * a.d_y.row_stride();
    const X* x = a.x.as<X>() + i * a.x.row_stride();
    X* d_x = a.d_x.as<X>() + i * a.d_x.row_stride();
    for (std::int64_t j = 0; j < g.row_length; ++j) {
      const std::int64_t p = g.param(i, j);
      const F s = to_math(a.scale.as<S>()[p]);
      const double code =
          unclamped_code(quotient<F>(to_math(x[j]), s), zero_point ? zero_point[p] : 0);
      const bool passes = s != 0 && in_range(code, d.q_min, d.q_max);
      d_x[j] = from_math<X>(passes ? to_math(d_y[j]) / s : F(0));
    }
  }
}

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  return visit_float(d.element, [&]<class X>(Type<X>) {
    if (d.f32_scale) {
      backward<X, float>(d, a);
    } else {
      backward<X, X>(d, a);
    }
    return Status();
  });
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<QuantizePerGroupBackward>> quantize_per_group_backward_ref() {
  return kKernels;
}

}  // namespace bittern
