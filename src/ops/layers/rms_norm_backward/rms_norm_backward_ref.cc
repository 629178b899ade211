#include "bittern/ops/rms_norm_backward.h"
#include "core/dot.h"
#include "core/numerics.h"
#include "core/row_runs.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = RmsNormBackward;

template <class X>
void differentiate(const Op::Desc& d, const Op::Args& a) {
  const auto dim = static_cast<std::size_t>(d.dim);
  const auto row = [](const auto& v, std::int64_t i) {
    auto* data = v.template as<X>();
    return v ? data + RowRuns(v.shape, v.stride, 1).offset(i) : data;
  };
  std::vector<float> x(dim), n(dim), e(dim), block(dim);
  std::vector<std::vector<float>> weight_terms(dim);
  const auto end_block = [&] {
    for (std::size_t j = 0; j < dim; ++j) weight_terms[j].push_back(block[j]);
    block.assign(dim, 0);
  };
  for (std::int64_t i = 0; i < d.rows; ++i) {
    const X *d_y = row(a.d_y, i), *d_sum = row(a.d_sum, i), *x_row = row(a.x, i);
    X* d_x = row(a.d_x, i);
    for (std::size_t j = 0; j < dim; ++j) x[j] = to_math(x_row[j]);
    const float mean = dot(x.data(), x.data(), d.dim) / static_cast<float>(d.dim);
    const float rstd = 1.0f / std::sqrt(mean + static_cast<float>(d.eps));
    for (std::size_t j = 0; j < dim; ++j) {
      const float weight = to_math(a.weight.as<X>()[j]) + static_cast<float>(d.offset);
      n[j] = x[j] * rstd;
      e[j] = to_math(d_y[j]) * weight;
      block[j] = std::fma(to_math(d_y[j]), n[j], block[j]);
    }
    const float along = dot(e.data(), n.data(), d.dim) / static_cast<float>(d.dim);
    for (std::size_t j = 0; a.d_x && j < dim; ++j) {
      const float v = rstd * std::fma(-n[j], along, e[j]);
      d_x[j] = from_math<X>(a.d_sum ? v + to_math(d_sum[j]) : v);
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

std::span<const Kernel<RmsNormBackward>> rms_norm_backward_ref() { return kKernels; }

}  // namespace bittern
