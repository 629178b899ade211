#include "bittern/ops/quantize_per_group.h"
#include "core/numerics.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = QuantizePerGroup;

template <class X, class S, class Q>
void quantize(const Op::Desc& d, const Op::Args& a) {
  const GroupGeometry g = d.geometry();
  const std::int32_t* zero_point = a.zero_point.as<std::int32_t>();
  for (std::int64_t i = 0; i < g.rows; ++i) {
    const X* x = a.x.as<X>() + i * a.x.row_stride();
    Q* q = a.q.as<Q>() + i * a.q.row_stride();
    for (std::int64_t j = 0; j < g.row_length; ++j) {
      const std::int64_t p = g.param(i, j);
      const auto z = quotient<Math<X>>(to_math(x[j]), to_math(a.scale.as<S>()[p]));
      q[j] = static_cast<Q>(quantize_code(z, zero_point ? zero_point[p] : 0, d.q_min, d.q_max));
    }
  }
}

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  return visit_float(d.element, [&]<class X>(Type<X>) {
    return visit<std::int8_t, std::uint8_t>(d.code, [&]<class Q>(Type<Q>) {
      if (d.f32_scale) {
        quantize<X, float, Q>(d, a);
      } else {
        quantize<X, X, Q>(d, a);
      }
      return Status();
    });
  });
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<QuantizePerGroup>> quantize_per_group_ref() { return kKernels; }

}  // namespace bittern
