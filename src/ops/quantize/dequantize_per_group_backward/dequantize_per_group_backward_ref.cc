#include "bittern/ops/dequantize_per_group_backward.h"
#include "core/numerics.h"
#include "ops/quantize/groups.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = DequantizePerGroupBackward;

template <class X, class S, class Q>
void backward(const Op::Desc& d, const Op::Args& a) {
  const GroupGeometry g = d.geometry();
  std::vector<Math<X>> terms;
  for (std::int64_t p = 0; p < g.params; ++p) {
    const Math<X> s = to_math(a.scale.as<S>()[p]);
    const std::int64_t zp = a.zero_point ? a.zero_point.as<std::int32_t>()[p] : 0;
    terms.clear();
    for_each_element(g, p, [&](std::int64_t i, std::int64_t j) {
      const Math<X> d_y = to_math(a.d_y.as<X>()[i * a.d_y.row_stride() + j]);
      const std::int64_t q = a.q.as<Q>()[i * a.q.row_stride() + j];
      terms.push_back(scaled(q - zp, d_y));
      if (a.d_q) a.d_q.as<X>()[i * a.d_q.row_stride() + j] = from_math<X>(d_y * s);
    });
    if (a.d_scale) a.d_scale.as<S>()[p] = from_math<S>(halving_sum(terms));
  }
}

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  return visit_float(d.element, [&]<class X>(Type<X>) {
    return visit<std::int8_t, std::uint8_t>(d.code, [&]<class Q>(Type<Q>) {
      if (d.f32_scale) {
        backward<X, Math<X>, Q>(d, a);
      } else {
        backward<X, X, Q>(d, a);
      }
      return Status();
    });
  });
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<Op>> dequantize_per_group_backward_ref() { return kKernels; }

}  // namespace bittern
