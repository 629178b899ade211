#include "bittern/ops/adam.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"
#include "ops/layers/adam/adam_factors.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/layers/adam/adam_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "ops/layers/lines-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = Adam;

// Elements [begin, end).
void RunAdam(const AdamFactors& f, const Op::Args& a, std::int64_t begin, std::int64_t end) {
  using lines::V;
  const auto set = [](float c) HWY_ATTR { return hn::Set(DotTag(), c); };
  const V beta1 = set(f.beta1), rest1 = set(f.rest1), beta2 = set(f.beta2), rest2 = set(f.rest2);
  const V rate = set(f.rate), inverse_root = set(f.inverse_root), epsilon = set(f.epsilon);
  const float* gradient = a.gradient.as<float>() + begin;
  float* parameter = a.parameter.as<float>() + begin;
  float* mean = a.mean.as<float>() + begin;
  float* variance = a.variance.as<float>() + begin;
  lines::Lines{end - begin}.Each([&](auto part) HWY_ATTR {
    const auto load = [&part](const float* row) HWY_ATTR { return part.Load(row); };
    const V g = load(gradient);
    const V m = hn::MulAdd(beta1, load(mean), hn::Mul(rest1, g));
    const V v = hn::MulAdd(beta2, load(variance), hn::Mul(hn::Mul(rest2, g), g));
    const V size = hn::MulAdd(inverse_root, hn::Sqrt(v), epsilon);
    part.Store(m, mean);
    part.Store(v, variance);
    part.Store(hn::Sub(load(parameter), hn::Mul(rate, hn::Div(m, size))), parameter);
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD

#if HWY_ONCE
namespace bittern {
namespace {

using Op = Adam;
BITTERN_EXPORT(RunAdam);

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  const AdamFactors factors(d);
  cpu::parallel(
      d.count, cpu::kGrain / 4,
      [&](std::int64_t begin, std::int64_t end) { BITTERN_CALL(RunAdam)(factors, a, begin, end); },
      16);
  return {};
}

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<Adam>> adam_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
