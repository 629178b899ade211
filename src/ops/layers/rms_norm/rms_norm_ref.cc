#include "bittern/ops/rms_norm.h"
#include "core/dot.h"
#include "core/numerics.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = RmsNorm;

template <class X>
void normalise(const Op::Desc& d, const Op::Args& a) {
  const auto rounded = [](float v) { return to_math(from_math<X>(v)); };
  std::vector<float> s(static_cast<std::size_t>(d.dim));
  for (std::int64_t i = 0; i < d.rows; ++i) {
    const X* x = a.x.as<X>() + i * a.x.row_stride();
    const X* residual = a.residual ? a.residual.as<X>() + i * a.residual.row_stride() : nullptr;
    for (std::int64_t j = 0; j < d.dim; ++j) {
      const float v = to_math(x[j]);
      s[static_cast<std::size_t>(j)] = residual != nullptr ? rounded(v + to_math(residual[j])) : v;
    }
    const float mean = dot(s.data(), s.data(), d.dim) / static_cast<float>(d.dim);
    const float rstd = 1.0f / std::sqrt(mean + static_cast<float>(d.eps));
    for (std::int64_t j = 0; j < d.dim; ++j) {
      const float v = s[static_cast<std::size_t>(j)];
      if (a.sum) a.sum.as<X>()[i * a.sum.row_stride() + j] = from_math<X>(v);
      const float n = d.rounding == NormRounding::each ? rounded(v * rstd) : v * rstd;
      const float weight = to_math(a.weight.as<X>()[j]) + static_cast<float>(d.offset);
      a.y.as<X>()[i * a.y.row_stride() + j] = from_math<X>(n * weight);
    }
  }
}

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  return visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    normalise<X>(d, a);
    return Status();
  });
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<RmsNorm>> rms_norm_ref() { return kKernels; }

}  // namespace bittern
