#include "bittern/ops/qdq_affine_backward.h"
#include "core/numerics.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = QdqAffineBackward;

template <class X, class S>
void sum_groups(const Op::Desc& d, const Op::Args& a) {
  using F = Math<X>;
  std::vector<F> scale_terms, bias_terms;
  for (std::int64_t i = 0; i < d.outer_size; ++i) {
    const X* d_y = a.d_y.as<X>() + i * a.d_y.row_stride();
    for (std::int64_t g = 0; g < d.num_groups(); ++g) {
      scale_terms.clear();
      bias_terms.clear();
      for (std::int64_t j = g * d.group_size; j < (g + 1) * d.group_size; ++j) {
        const std::uint32_t q =
            d.storage == CodeStorage::u8
                ? a.q.as<std::uint8_t>()[i * a.q.row_stride() + j]
                : packed_code(a.q.as<std::uint32_t>() + i * a.q.row_stride(), j, d.code_bits());
        scale_terms.push_back(static_cast<F>(q) * to_math(d_y[j]));
        bias_terms.push_back(to_math(d_y[j]));
      }
      const std::int64_t at = i * d.num_groups() + g;
      if (a.d_scales) a.d_scales.as<S>()[at] = from_math<S>(halving_sum(scale_terms));
      if (a.d_biases) a.d_biases.as<S>()[at] = from_math<S>(halving_sum(bias_terms));
    }
  }
}

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  return visit_float(d.element, [&]<class X>(Type<X>) {
    if constexpr (!std::is_same_v<X, double>) {
      if (d.f32_scale) {
        sum_groups<X, float>(d, a);
        return Status();
      }
    }
    sum_groups<X, X>(d, a);
    return Status();
  });
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<QdqAffineBackward>> qdq_affine_backward_ref() { return kKernels; }

}  // namespace bittern
