#include "bittern/ops/adam.h"
#include "ops/layers/adam/adam_factors.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = Adam;

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  const AdamFactors f(d);
  for (std::int64_t i = 0; i < d.count; ++i) {
    const float g = a.gradient.as<float>()[i];
    float& mean = a.mean.as<float>()[i];
    float& variance = a.variance.as<float>()[i];
    float& parameter = a.parameter.as<float>()[i];
    mean = std::fma(f.beta1, mean, f.rest1 * g);
    variance = std::fma(f.beta2, variance, (f.rest2 * g) * g);
    const float size = std::fma(f.inverse_root, std::sqrt(variance), f.epsilon);
    parameter = parameter - f.rate * (mean / size);
  }
  return {};
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<Adam>> adam_ref() { return kKernels; }

}  // namespace bittern
