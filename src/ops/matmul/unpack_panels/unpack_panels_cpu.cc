#include "bittern/ops/unpack_panels.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/matmul/unpack_panels/unpack_panels_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "ops/matmul/repack-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = UnpackPanels;

void RunUnpackPanels(const Op::Desc& d, const Op::Args& a, std::int64_t begin, std::int64_t end) {
  const Repacker repacker(d);
  const auto parts = StoredPartsOf<std::uint8_t>(a);
  const std::int64_t bytes = d.panel_shape()[1];
  for (std::int64_t n = begin; n < end; ++n) {
    const auto* panel = a.panels.as<std::uint8_t>() + n / matmul::kLanes * bytes;
    repacker.RowFromPanel(panel, static_cast<int>(n % matmul::kLanes), parts, n);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD

#if HWY_ONCE
namespace bittern {
namespace {

using Op = UnpackPanels;
BITTERN_EXPORT(RunUnpackPanels);

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  if (d.inputs == 0) return {};
  cpu::parallel(d.outputs, cpu::kGrain / d.inputs, [&](std::int64_t begin, std::int64_t end) {
    BITTERN_CALL(RunUnpackPanels)(d, a, begin, end);
  });
  return {};
}

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<UnpackPanels>> unpack_panels_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
