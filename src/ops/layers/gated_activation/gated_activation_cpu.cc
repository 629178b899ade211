#include "bittern/ops/gated_activation.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/layers/gated_activation/gated_activation_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "cpu/activations-inl.h"
#include "ops/layers/lines-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = GatedActivation;

template <class X, class F>
HWY_INLINE void ActivateWith(const Op::Desc& d, const Op::Args& a, std::int64_t begin,
                             std::int64_t end, const F& f) {
  const DotTag tag;
  const bool each = d.rounding == NormRounding::each;
  for (std::int64_t i = begin; i < end; ++i) {
    const X* gate = a.gate.as<X>() + i * a.gate.row_stride();
    const X* up = a.up.as<X>() + i * a.up.row_stride();
    X* y = a.y.as<X>() + i * a.y.row_stride();
    lines::Lines{d.dim}.Each([&](auto part) HWY_ATTR {
      auto g = f(part.Load(gate));
      if (each) g = RoundMath<X>(tag, g);
      part.Store(hn::Mul(g, part.Load(up)), y);
    });
  }
}

template <class X>
void Activate(const Op::Desc& d, const Op::Args& a, std::int64_t begin, std::int64_t end) {
  using lines::V;
  const DotTag tag;
  switch (d.kind) {
    case GatedKind::geglu_tanh:
      return ActivateWith<X>(d, a, begin, end, [tag](V x) HWY_ATTR { return GeluTanh(tag, x); });
    case GatedKind::geglu_erf:
      return ActivateWith<X>(d, a, begin, end, [tag](V x) HWY_ATTR { return Gelu(tag, x); });
    default: return ActivateWith<X>(d, a, begin, end, [tag](V x) HWY_ATTR { return Silu(tag, x); });
  }
}

void RunGatedActivation(const Op::Desc& d, const Op::Args& a, std::int64_t begin,
                        std::int64_t end) {
  (void)visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    Activate<X>(d, a, begin, end);
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

using Op = GatedActivation;
BITTERN_EXPORT(RunGatedActivation);

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  cpu::parallel(d.rows, cpu::kGrain / d.dim, [&](std::int64_t begin, std::int64_t end) {
    BITTERN_CALL(RunGatedActivation)(d, a, begin, end);
  });
  return {};
}

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<GatedActivation>> gated_activation_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
