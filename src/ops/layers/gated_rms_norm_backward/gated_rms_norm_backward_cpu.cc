#include "bittern/ops/gated_rms_norm_backward.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/layers/gated_rms_norm_backward/gated_rms_norm_backward_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "cpu/dot-inl.h"
#include "cpu/math-inl.h"
#include "ops/layers/norm-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = GatedRmsNormBackward;

// One block of rows; its d_weight goes to `sums`.
template <class X>
void Differentiate(const Op::Desc& d, const Op::Args& a, std::int64_t block, float* sums) {
  using norm::V;
  const DotTag tag;
  const norm::Lines line{d.dim};
  const X* weight = a.weight.as<X>();
  std::fill_n(sums, d.dim, 0.0f);
  const std::int64_t begin = block * Op::Desc::kBlock;
  for (std::int64_t i = begin; i < std::min(d.rows, begin + Op::Desc::kBlock); ++i) {
    const X* x = a.x.as<X>() + i * a.x.row_stride();
    const X* z = a.z.as<X>() + i * a.z.row_stride();
    const X* d_y = a.d_y.as<X>() + i * a.d_y.row_stride();
    const float rstd = norm::Rstd(d, x);
    const auto r = hn::Set(tag, rstd);
    const auto along = hn::Set(tag, line.Sum([&](auto part, V& e, V& n) HWY_ATTR {
      const V gate = part.Load(z), s = Sigmoid(tag, gate), g = part.Load(d_y);
      const V w = part.Load(weight);
      n = hn::Mul(part.Load(x), r);
      const V h = hn::Mul(g, hn::Mul(gate, s));
      e = hn::Mul(h, w);
      part.Store(hn::MulAdd(h, n, part.Load(static_cast<const float*>(sums))), sums);
      if (a.d_z) {
        const V slope = SiluSlope(tag, gate, s);
        part.Store(hn::Mul(hn::Mul(g, hn::Mul(n, w)), slope),
                   a.d_z.as<X>() + i * a.d_z.row_stride());
      }
    }) / static_cast<float>(d.dim));
    if (!a.d_x) continue;
    line.Each([&](auto part) HWY_ATTR {
      const V n = hn::Mul(part.Load(x), r);
      const V h = hn::Mul(part.Load(d_y), Silu(tag, part.Load(z)));
      const V e = hn::Mul(h, part.Load(weight));
      part.Store(hn::Mul(r, hn::NegMulAdd(n, along, e)), a.d_x.as<X>() + i * a.d_x.row_stride());
    });
  }
}

// Blocks of rows [begin, end).
void RunGatedRmsNormBackward(const Op::Desc& d, const Op::Args& a, float* partial,
                             std::int64_t begin, std::int64_t end) {
  (void)visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    for (std::int64_t b = begin; b < end; ++b) Differentiate<X>(d, a, b, partial + b * d.dim);
    return Status();
  });
}

// d_weight of columns [begin, end).
void SumGatedRmsNormBackward(const Op::Desc& d, const Op::Args& a, float* partial,
                             std::int64_t begin, std::int64_t end) {
  norm::SumBlocks(d, a.d_weight, partial, begin, end);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD

#if HWY_ONCE
namespace bittern {
namespace {

using Op = GatedRmsNormBackward;
BITTERN_EXPORT(RunGatedRmsNormBackward);
BITTERN_EXPORT(SumGatedRmsNormBackward);

std::size_t workspace(const Op::Desc& d, Device) {
  return static_cast<std::size_t>(d.blocks() * d.dim) * sizeof(float);
}

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace space) {
  auto* partial = static_cast<float*>(space.data);
  cpu::parallel(d.blocks(), cpu::kGrain / (d.dim * Op::Desc::kBlock),
                [&](std::int64_t begin, std::int64_t end) {
                  BITTERN_CALL(RunGatedRmsNormBackward)(d, a, partial, begin, end);
                });
  if (!a.d_weight) return {};
  cpu::parallel(d.dim, cpu::kGrain / std::max<std::int64_t>(d.blocks(), 1),
                [&](std::int64_t begin, std::int64_t end) {
                  BITTERN_CALL(SumGatedRmsNormBackward)(d, a, partial, begin, end);
                });
  return {};
}

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run, workspace)};

}  // namespace

std::span<const Kernel<GatedRmsNormBackward>> gated_rms_norm_backward_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
