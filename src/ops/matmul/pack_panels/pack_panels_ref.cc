#include "bittern/ops/pack_panels.h"
#include "ops/matmul/weights.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = PackPanels;

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  WeightDesc stored = d;
  stored.layout = WeightLayout::stored;
  auto* panels = a.panels.as<std::uint8_t>();
  const std::int64_t bytes = d.panel_shape()[1];
  for (std::int64_t i = 0; i < d.panels() * bytes; ++i) panels[i] = 0;
  struct Weights {
    ConstView w, packed, scales, biases, blocks, panels;
  } const weights{a.w, a.packed, a.scales, a.biases, a.blocks, {}};
  for (std::int64_t n = 0; n < d.outputs; ++n) {
    matmul::StoredRow row = matmul::read_row(stored, weights, n);
    matmul::row_to_panel(d, row, static_cast<int>(n % matmul::kLanes),
                         panels + n / matmul::kLanes * bytes);
  }
  return {};
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<PackPanels>> pack_panels_ref() { return kKernels; }

}  // namespace bittern
