#include "bittern/ops/log_softmax.h"
#include "core/activations.h"
#include "core/numerics.h"
#include "ops/layers/log_sum.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = LogSoftmax;

float logit(const Op::Desc& d, float x) {
  const auto cap = static_cast<float>(d.softcap);
  const float v = cap > 0 ? cap * math::tanh(x / cap) : x;
  return v / static_cast<float>(d.temperature);
}

template <class X>
void normalise(const Op::Desc& d, const Op::Args& a) {
  std::vector<float> v(static_cast<std::size_t>(d.dim));
  for (std::int64_t i = 0; i < d.rows; ++i) {
    const X* x = a.x.as<X>() + i * a.x.row_stride();
    float* y = a.y.as<float>() + i * a.y.row_stride();
    float most = -std::numeric_limits<float>::infinity();
    for (std::int64_t j = 0; j < d.dim; ++j) {
      v[static_cast<std::size_t>(j)] = logit(d, to_math(x[j]));
      most = std::max(most, v[static_cast<std::size_t>(j)]);
    }
    const float log_sum = log_of_sum(chain_sum(
        d.dim, [&](std::int64_t j) { return math::exp(v[static_cast<std::size_t>(j)] - most); }));
    for (std::int64_t j = 0; j < d.dim; ++j)
      y[j] = (v[static_cast<std::size_t>(j)] - most) - log_sum;
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

std::span<const Kernel<LogSoftmax>> log_softmax_ref() { return kKernels; }

}  // namespace bittern
