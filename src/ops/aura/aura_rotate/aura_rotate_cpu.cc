#include "bittern/ops/aura_rotate.h"
#include "cpu/kernel.h"
#include "ops/aura/parallel_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/aura/aura_rotate/aura_rotate_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "ops/aura/rotate-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

void RotateRows(const AuraDesc& d, const AuraRotate::Args& a, std::int64_t begin,
                std::int64_t end) {
  const RowRotation rotation(d.rotation, d.dim, a.table.as<float>());
  const std::int64_t stride = RoundUpToLanes(d.dim);
  HWY_ALIGN float tile[kF32Lanes * kAuraMaxDim];
  (void)visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) HWY_ATTR {
    for (std::int64_t first = begin; first < end; first += kF32Lanes) {
      const std::int64_t count = std::min(end - first, kF32Lanes);
      for (std::int64_t i = 0; i < count; ++i)
        LoadRow(a.x.as<X>() + (first + i) * a.x.row_stride(), d.dim, tile + i * stride);
      rotation.Apply(tile, stride, count, d.inverse);
      for (std::int64_t i = 0; i < count; ++i)
        StoreRow(tile + i * stride, d.dim, a.y.as<X>() + (first + i) * a.y.row_stride());
    }
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

using Op = AuraRotate;
BITTERN_EXPORT(RotateRows);

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  cpu::parallel_rows(
      d, [&](std::int64_t begin, std::int64_t end) { BITTERN_CALL(RotateRows)(d, a, begin, end); });
  return {};
}

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<AuraRotate>> aura_rotate_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
