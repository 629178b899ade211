#include "bittern/ops/rms_norm.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/layers/rms_norm/rms_norm_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "ops/layers/norm-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = RmsNorm;

template <class X>
void Normalise(const Op::Desc& d, const Op::Args& a, std::int64_t begin, std::int64_t end) {
  using norm::V;
  const DotTag tag;
  const norm::Lines line{d.dim};
  const bool each = d.rounding == NormRounding::each;
  const V offset = hn::Set(tag, static_cast<float>(d.offset));
  const X* weight = a.weight.as<X>();
  for (std::int64_t i = begin; i < end; ++i) {
    const X* x = a.x.as<X>() + i * a.x.row_stride();
    const X* residual = a.residual ? a.residual.as<X>() + i * a.residual.row_stride() : nullptr;
    X* sum = a.sum ? a.sum.as<X>() + i * a.sum.row_stride() : nullptr;
    X* y = a.y.as<X>() + i * a.y.row_stride();
    const auto value = [&](auto part) HWY_ATTR {
      const V v = part.Load(x);
      return residual == nullptr ? v : RoundMath<X>(tag, hn::Add(v, part.Load(residual)));
    };
    const float squares = line.Sum([&](auto part, V& p, V& q) HWY_ATTR {
      p = q = value(part);
      if (sum != nullptr) part.Store(p, sum);
    });
    const V rstd = hn::Set(tag, norm::Rstd(d, squares));
    line.Each([&](auto part) HWY_ATTR {
      // residual may be gone: `sum` may be its memory.
      V n = sum != nullptr ? part.Load(static_cast<const X*>(sum)) : value(part);
      n = hn::Mul(n, rstd);
      if (each) n = RoundMath<X>(tag, n);
      part.Store(hn::Mul(n, hn::Add(part.Load(weight), offset)), y);
    });
  }
}

void RunRmsNorm(const Op::Desc& d, const Op::Args& a, std::int64_t begin, std::int64_t end) {
  (void)visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    Normalise<X>(d, a, begin, end);
    return Status();
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

using Op = RmsNorm;
BITTERN_EXPORT(RunRmsNorm);

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  cpu::parallel(d.rows, cpu::kGrain / d.dim, [&](std::int64_t begin, std::int64_t end) {
    BITTERN_CALL(RunRmsNorm)(d, a, begin, end);
  });
  return {};
}

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<RmsNorm>> rms_norm_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
