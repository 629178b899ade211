#include "bittern/ops/pack_panels.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/matmul/pack_panels/pack_panels_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "ops/matmul/repack-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = PackPanels;

void RunPackPanels(const Op::Desc& d, const Op::Args& a, std::int64_t begin, std::int64_t end) {
  const Repacker repacker(d);
  const auto parts = StoredPartsOf<const std::uint8_t>(a);
  const std::int64_t bytes = d.panel_shape()[1];
  for (std::int64_t p = begin; p < end; ++p)
    repacker.ToPanel(parts, p * matmul::kLanes, a.panels.as<std::uint8_t>() + p * bytes);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD

#if HWY_ONCE
namespace bittern {
namespace {

using Op = PackPanels;
BITTERN_EXPORT(RunPackPanels);

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  if (d.inputs == 0) return {};
  const std::int64_t panel = matmul::kLanes * d.inputs;
  cpu::parallel(d.panels(), cpu::kGrain / panel, [&](std::int64_t begin, std::int64_t end) {
    BITTERN_CALL(RunPackPanels)(d, a, begin, end);
  });
  return {};
}

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<PackPanels>> pack_panels_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
