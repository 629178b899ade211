// A row is repacked into a panel of its own if it is stored, and its panel expanded.
#include "bittern/ops/embedding.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/matmul/embedding/embedding_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "ops/matmul/expand-inl.h"
#include "ops/matmul/repack-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = Embedding;

// Numbers that are expanded at once.
constexpr std::int64_t kNumbers = 512;

void RunEmbedding(const Op::Desc& d, const Op::Args& a, std::uint8_t* scratch, std::int64_t begin,
                  std::int64_t end) {
  const WeightDesc& w = d.weights;
  const Repacker repacker(w);
  const auto parts = StoredPartsOf<const std::uint8_t>(a);
  const std::int64_t bytes = w.panel_shape()[1];
  const std::int64_t step = kNumbers / ExpandStep(w) * ExpandStep(w);
  if (w.stored()) std::memset(scratch, 0, static_cast<std::size_t>(bytes));
  (void)visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    alignas(64) float numbers[kNumbers * matmul::kLanes];
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t n = a.ids.as<std::int32_t>()[i];
      const std::uint8_t* panel = scratch;
      std::int64_t lane = 0;
      if (w.stored()) {
        repacker.RowToPanel(parts, n, 0, scratch);
      } else {
        panel = a.panels.as<std::uint8_t>() + n / matmul::kLanes * bytes;
        lane = n % matmul::kLanes;
      }
      X* y = a.y.as<X>() + i * a.y.row_stride();
      for (std::int64_t first = 0; first < w.inputs; first += step) {
        const std::int64_t count = std::min(step, w.inputs - first);
        Expand(w, panel, first, count, numbers);
        for (std::int64_t k = 0; k < count; ++k)
          y[first + k] = from_math<X>(numbers[k * matmul::kLanes + lane]);
      }
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

using Op = Embedding;
BITTERN_EXPORT(RunEmbedding);

// Of one thread: a panel, in whole lines.
std::size_t panel_scratch(const Op::Desc& d) {
  if (!d.weights.stored()) return 64;
  return static_cast<std::size_t>(d.weights.panel_shape()[1] + 64) / 64 * 64;
}

std::size_t workspace(const Op::Desc& d, Device) {
  return static_cast<std::size_t>(std::max(num_threads(), 1)) * panel_scratch(d);
}

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace workspace) {
  if (d.weights.inputs == 0) return {};
  const std::size_t bytes = panel_scratch(d);
  cpu::parallel_slots(d.rows, static_cast<std::int64_t>(workspace.bytes / bytes),
                      [&](std::int64_t slot, std::int64_t begin, std::int64_t end) {
                        auto* scratch = static_cast<std::uint8_t*>(workspace.data) +
                                        static_cast<std::size_t>(slot) * bytes;
                        BITTERN_CALL(RunEmbedding)(d, a, scratch, begin, end);
                      });
  return {};
}

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run, workspace)};

}  // namespace

std::span<const Kernel<Embedding>> embedding_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
