#include "bittern/ops/dynamic_quantize.h"
#include "ops/quantize/dynamic.h"
#include "ops/quantize/groups.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = DynamicQuantize;

template <class X, class S, class Q>
void quantize(const Op::Desc& d, const Op::Args& a) {
  using M = Math<X>;
  const GroupGeometry g = d.geometry();
  const auto x = [&](std::int64_t i, std::int64_t j) {
    return to_math(a.x.as<X>()[i * a.x.row_stride() + j]);
  };
  for (std::int64_t p = 0; p < g.params; ++p) {
    FiniteRange<M> range;
    for_each_element(g, p, [&](std::int64_t i, std::int64_t j) { range.take(x(i, j)); });
    const S stored = d.symmetric ? symmetric_scale<S>(range, d.q_max)
                                 : asymmetric_scale<S>(range, d.q_min, d.q_max);
    const M s = to_math(stored);
    const std::int32_t zp = d.symmetric ? 0 : zero_point_for(range.lo, s, d.q_min, d.q_max);
    a.scale.as<S>()[p] = stored;
    if (!d.symmetric) a.zero_point.as<std::int32_t>()[p] = zp;
    for_each_element(g, p, [&](std::int64_t i, std::int64_t j) {
      a.q.as<Q>()[i * a.q.row_stride() + j] =
          static_cast<Q>(quantize_code(quotient(x(i, j), s), zp, d.q_min, d.q_max));
    });
  }
}

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  return visit_float(d.element, [&]<class X>(Type<X>) {
    return visit<std::int8_t, std::uint8_t>(d.code, [&]<class Q>(Type<Q>) {
      if (d.f32_scale) {
        quantize<X, Math<X>, Q>(d, a);
      } else {
        quantize<X, X, Q>(d, a);
      }
      return Status();
    });
  });
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<Op>> dynamic_quantize_ref() { return kKernels; }

}  // namespace bittern
