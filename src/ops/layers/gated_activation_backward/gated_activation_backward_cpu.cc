#include "bittern/ops/gated_activation_backward.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/layers/gated_activation_backward/gated_activation_backward_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "cpu/activations-inl.h"
#include "ops/layers/lines-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = GatedActivationBackward;
using lines::V;

// f(x, value, slope)
template <class X, class F>
HWY_INLINE void DifferentiateWith(const Op::Desc& d, const Op::Args& a, std::int64_t begin,
                                  std::int64_t end, const F& f) {
  for (std::int64_t i = begin; i < end; ++i) {
    const X* d_y = a.d_y.as<X>() + i * a.d_y.row_stride();
    const X* gate = a.gate.as<X>() + i * a.gate.row_stride();
    const X* up = a.up.as<X>() + i * a.up.row_stride();
    X* d_gate = a.d_gate ? a.d_gate.as<X>() + i * a.d_gate.row_stride() : nullptr;
    X* d_up = a.d_up ? a.d_up.as<X>() + i * a.d_up.row_stride() : nullptr;
    lines::Lines{d.dim}.Each([&](auto part) HWY_ATTR {
      // All are read before a result is written: it may be the memory of any.
      const V g = part.Load(d_y), u = part.Load(up);
      V value, slope;
      f(part.Load(gate), value, slope);
      if (d_gate != nullptr) part.Store(hn::Mul(hn::Mul(g, u), slope), d_gate);
      if (d_up != nullptr) part.Store(hn::Mul(g, value), d_up);
    });
  }
}

template <class X>
void Differentiate(const Op::Desc& d, const Op::Args& a, std::int64_t begin, std::int64_t end) {
  const DotTag tag;
  switch (d.kind) {
    case GatedKind::geglu_tanh:
      return DifferentiateWith<X>(d, a, begin, end, [tag](V x, V& value, V& slope) HWY_ATTR {
        const V gate = GeluTanhGate(tag, x);
        value = hn::Mul(x, gate);
        slope = GeluTanhSlope(tag, x, gate);
      });
    case GatedKind::geglu_erf:
      return DifferentiateWith<X>(d, a, begin, end, [tag](V x, V& value, V& slope) HWY_ATTR {
        GeluParts<V> parts;
        SplitGelu(tag, x, parts);
        value = hn::Mul(x, parts.below);
        slope = GeluSlope(tag, x, parts);
      });
    default:
      return DifferentiateWith<X>(d, a, begin, end, [tag](V x, V& value, V& slope) HWY_ATTR {
        const V s = Sigmoid(tag, x);
        value = hn::Mul(x, s);
        slope = SiluSlope(tag, x, s);
      });
  }
}

void RunGatedActivationBackward(const Op::Desc& d, const Op::Args& a, std::int64_t begin,
                                std::int64_t end) {
  (void)visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    Differentiate<X>(d, a, begin, end);
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

using Op = GatedActivationBackward;
BITTERN_EXPORT(RunGatedActivationBackward);

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  cpu::parallel(d.rows, cpu::kGrain / d.dim, [&](std::int64_t begin, std::int64_t end) {
    BITTERN_CALL(RunGatedActivationBackward)(d, a, begin, end);
  });
  return {};
}

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<GatedActivationBackward>> gated_activation_backward_cpu() {
  return kKernels;
}

}  // namespace bittern
#endif  // HWY_ONCE
