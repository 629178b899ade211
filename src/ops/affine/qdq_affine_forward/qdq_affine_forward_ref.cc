#include "bittern/ops/qdq_affine_forward.h"
#include "core/numerics.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = QdqAffineForward;

template <class X, class S>
void dequantize(const Op::Desc& d, const Op::Args& a) {
  const bool once = d.rounding == AffineRounding::once;
  for (std::int64_t i = 0; i < d.outer_size; ++i) {
    X* y = a.y.as<X>() + i * a.y.row_stride();
    for (std::int64_t j = 0; j < d.axis_size; ++j) {
      const std::uint32_t q =
          d.storage == CodeStorage::u8
              ? a.q.as<std::uint8_t>()[i * a.q.row_stride() + j]
              : packed_code(a.q.as<std::uint32_t>() + i * a.q.row_stride(), j, d.code_bits());
      const std::int64_t group = i * d.num_groups() + j / d.group_size;
      y[j] = affine_value<X>(q, to_math(a.scales.as<S>()[group]), to_math(a.biases.as<S>()[group]),
                             once);
    }
  }
}

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  return visit_float(d.element, [&]<class X>(Type<X>) {
    if (d.f32_scale) {
      dequantize<X, float>(d, a);
    } else {
      dequantize<X, X>(d, a);
    }
    return Status();
  });
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<QdqAffineForward>> qdq_affine_forward_ref() { return kKernels; }

}  // namespace bittern
