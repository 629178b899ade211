#include "bittern/ops/gated_rms_norm.h"
#include "core/dot.h"
#include "core/math.h"
#include "core/numerics.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = GatedRmsNorm;

template <class X>
void normalise(const Op::Desc& d, const Op::Args& a) {
  const auto rounded = [&](float v) {
    return d.rounding == NormRounding::each ? to_math(from_math<X>(v)) : v;
  };
  std::vector<float> x(static_cast<std::size_t>(d.dim));
  for (std::int64_t i = 0; i < d.rows; ++i) {
    const X* row = a.x.as<X>() + i * a.x.row_stride();
    const X* z = a.z.as<X>() + i * a.z.row_stride();
    X* y = a.y.as<X>() + i * a.y.row_stride();
    for (std::int64_t j = 0; j < d.dim; ++j) x[static_cast<std::size_t>(j)] = to_math(row[j]);
    const float mean = dot(x.data(), x.data(), d.dim) / static_cast<float>(d.dim);
    const float rstd = 1.0f / std::sqrt(mean + static_cast<float>(d.eps));
    for (std::int64_t j = 0; j < d.dim; ++j) {
      const float n = rounded(x[static_cast<std::size_t>(j)] * rstd);
      const float weighted = rounded(n * to_math(a.weight.as<X>()[j]));
      y[j] = from_math<X>(weighted * math::silu(to_math(z[j])));
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

std::span<const Kernel<GatedRmsNorm>> gated_rms_norm_ref() { return kKernels; }

}  // namespace bittern
