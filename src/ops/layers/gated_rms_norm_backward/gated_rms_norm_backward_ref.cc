#include "bittern/ops/gated_rms_norm_backward.h"
#include "core/dot.h"
#include "core/math.h"
#include "core/numerics.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = GatedRmsNormBackward;

template <class X>
void differentiate(const Op::Desc& d, const Op::Args& a) {
  const auto dim = static_cast<std::size_t>(d.dim);
  std::vector<float> x(dim), n(dim), h(dim), e(dim), block(dim);
  std::vector<std::vector<float>> weight_terms(dim);
  const auto end_block = [&] {
    for (std::size_t j = 0; j < dim; ++j) weight_terms[j].push_back(block[j]);
    block.assign(dim, 0);
  };
  for (std::int64_t i = 0; i < d.rows; ++i) {
    const X* z = a.z.as<X>() + i * a.z.row_stride();
    const X* d_y = a.d_y.as<X>() + i * a.d_y.row_stride();
    for (std::size_t j = 0; j < dim; ++j)
      x[j] = to_math(a.x.as<X>()[i * a.x.row_stride() + static_cast<std::int64_t>(j)]);
    const float mean = dot(x.data(), x.data(), d.dim) / static_cast<float>(d.dim);
    const float rstd = 1.0f / std::sqrt(mean + static_cast<float>(d.eps));
    for (std::size_t j = 0; j < dim; ++j) {
      const float gate = to_math(z[j]), s = math::sigmoid(gate);
      const float weight = to_math(a.weight.as<X>()[j]);
      n[j] = x[j] * rstd;
      h[j] = to_math(d_y[j]) * (gate * s);
      e[j] = h[j] * weight;
      block[j] = std::fma(h[j], n[j], block[j]);
      if (a.d_z) {
        const float slope = math::silu_slope(gate, s);
        a.d_z.as<X>()[i * a.d_z.row_stride() + static_cast<std::int64_t>(j)] =
            from_math<X>((to_math(d_y[j]) * (n[j] * weight)) * slope);
      }
    }
    const float along = dot(e.data(), n.data(), d.dim) / static_cast<float>(d.dim);
    for (std::size_t j = 0; a.d_x && j < dim; ++j) {
      a.d_x.as<X>()[i * a.d_x.row_stride() + static_cast<std::int64_t>(j)] =
          from_math<X>(rstd * std::fma(-n[j], along, e[j]));
    }
    if ((i + 1) % Op::Desc::kBlock == 0) end_block();
  }
  if (d.rows % Op::Desc::kBlock != 0) end_block();
  for (std::size_t j = 0; a.d_weight && j < dim; ++j)
    a.d_weight.as<X>()[j] = from_math<X>(halving_sum(weight_terms[j]));
}

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  return visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    differentiate<X>(d, a);
    return Status();
  });
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<GatedRmsNormBackward>> gated_rms_norm_backward_ref() { return kKernels; }

}  // namespace bittern
