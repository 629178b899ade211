#include "bittern/ops/fake_quantize_per_group.h"
#include "core/numerics.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = FakeQuantizePerGroup;

template <class X, class S>
void fake_quantize(const Op::Desc& d, const Op::Args& a) {
  const GroupGeometry g = d.geometry();
  const std::int32_t* zero_point = a.zero_point.as<std::int32_t>();
  for (std::int64_t i = 0; i < g.rows; ++i) {
    const X* x = a.x.as<X>() + i * a.x.row_stride();
    X* y = a.y.as<X>() + i * a.y.row_stride();
    for (std::int64_t j = 0; j < g.row_length; ++j) {
      const std::int64_t p = g.param(i, j);
      const Math<X> s = to_math(a.scale.as<S>()[p]);
      const std::int32_t zero = zero_point ? zero_point[p] : 0;
      const std::int32_t code =
          quantize_code(quotient<Math<X>>(to_math(x[j]), s), zero, d.q_min, d.q_max);
      y[j] = from_math<X>(scaled(std::int64_t{code} - zero, s));
    }
  }
}

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  return visit_float(d.element, [&]<class X>(Type<X>) {
    if (d.f32_scale) {
      fake_quantize<X, float>(d, a);
    } else {
      fake_quantize<X, X>(d, a);
    }
    return Status();
  });
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<FakeQuantizePerGroup>> fake_quantize_per_group_ref() { return kKernels; }

}  // namespace bittern
