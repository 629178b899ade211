#include "bittern/ops/dequantize_per_group.h"
#include "core/numerics.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = DequantizePerGroup;

template <class X, class S, class Q>
void dequantize(const Op::Desc& d, const Op::Args& a) {
  const GroupGeometry g = d.geometry();
  const std::int32_t* zero_point = a.zero_point.as<std::int32_t>();
  for (std::int64_t i = 0; i < g.rows; ++i) {
    const Q* q = a.q.as<Q>() + i * a.q.row_stride();
    X* y = a.y.as<X>() + i * a.y.row_stride();
    for (std::int64_t j = 0; j < g.row_length; ++j) {
      const std::int64_t p = g.param(i, j);
      const std::int64_t difference = std::int64_t{q[j]} - (zero_point ? zero_point[p] : 0);
      const Math<X> s = to_math(a.scale.as<S>()[p]);
      y[j] = from_math<X>(scaled(difference, s));
    }
  }
}

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  return visit_float(d.element, [&]<class X>(Type<X>) {
    return visit<std::int8_t, std::uint8_t>(d.code, [&]<class Q>(Type<Q>) {
      if (d.f32_scale) {
        dequantize<X, float, Q>(d, a);
      } else {
        dequantize<X, X, Q>(d, a);
      }
      return Status();
    });
  });
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<DequantizePerGroup>> dequantize_per_group_ref() { return kKernels; }

}  // namespace bittern
