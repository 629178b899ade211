#include "bittern/ops/fake_quantize_per_group_backward.h"
#include "core/numerics.h"
#include "ops/quantize/groups.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = FakeQuantizePerGroupBackward;

template <class X, class S>
void backward(const Op::Desc& d, const Op::Args& a) {
  using M = Math<X>;
  const GroupGeometry g = d.geometry();
  std::vector<M> scale_terms, zero_point_terms;
  for (std::int64_t p = 0; p < g.params; ++p) {
    const M s = to_math(a.scale.as<S>()[p]);
    const std::int32_t zp = a.zero_point ? a.zero_point.as<std::int32_t>()[p] : 0;
    scale_terms.clear();
    zero_point_terms.clear();
    for_each_element(g, p, [&](std::int64_t i, std::int64_t j) {
      const X d_y_stored = a.d_y.as<X>()[i * a.d_y.row_stride() + j];
      const M d_y = to_math(d_y_stored);
      const M z = quotient<M>(to_math(a.x.as<X>()[i * a.x.row_stride() + j]), s);
      const bool inside = in_range(unclamped_code(z, zp), d.q_min, d.q_max);
      const std::int64_t q = quantize_code(z, zp, d.q_min, d.q_max);
      scale_terms.push_back(inside ? d_y * (std::nearbyint(z) - z) : scaled(q - zp, d_y));
      zero_point_terms.push_back(inside ? M(0) : -(s * d_y));
      if (a.d_x)
        a.d_x.as<X>()[i * a.d_x.row_stride() + j] = inside ? d_y_stored : from_math<X>(M(0));
    });
    if (a.d_scale) a.d_scale.as<S>()[p] = from_math<S>(halving_sum(scale_terms));
    if (a.d_zero_point) a.d_zero_point.as<S>()[p] = from_math<S>(halving_sum(zero_point_terms));
  }
}

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  return visit_float(d.element, [&]<class X>(Type<X>) {
    if (d.f32_scale) {
      backward<X, Math<X>>(d, a);
    } else {
      backward<X, X>(d, a);
    }
    return Status();
  });
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<Op>> fake_quantize_per_group_backward_ref() { return kKernels; }

}  // namespace bittern
