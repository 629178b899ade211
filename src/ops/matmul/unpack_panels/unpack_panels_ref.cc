#include "bittern/ops/unpack_panels.h"
#include "ops/matmul/weights.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = UnpackPanels;

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  WeightDesc from = d;
  from.layout = WeightLayout::panels;
  for (std::int64_t n = 0; n < d.outputs; ++n) {
    matmul::StoredRow row = matmul::read_row(from, a, n);
    matmul::for_stored(d, a, n, row,
                       [](const std::uint8_t* bytes, std::uint8_t* to, std::size_t size) {
                         if (size != 0) std::memcpy(to, bytes, size);
                       });
  }
  return {};
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<UnpackPanels>> unpack_panels_ref() { return kKernels; }

}  // namespace bittern
