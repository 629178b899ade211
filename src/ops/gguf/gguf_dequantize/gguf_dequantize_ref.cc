#include "bittern/ops/gguf_dequantize.h"
#include "core/blocks.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = GgufDequantize;

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  const BlockSize size = block_size(d.type);
  return visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    for (std::int64_t i = 0; i < d.outer_size; ++i) {
      for (std::int64_t j = 0; j < d.axis_size; ++j) {
        const std::uint8_t* block =
            a.blocks.as<std::uint8_t>() + i * a.blocks.row_stride() + j / size.weights * size.bytes;
        const int k = static_cast<int>(j % size.weights);
        const GroupGrid grid = block_grid(d.type, block, k);
        const float product = grid.s * static_cast<float>(block_code(d.type, block, k));
        a.y.as<X>()[i * a.y.row_stride() + j] = from_math<X>(product - grid.m);
      }
    }
    return Status();
  });
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<GgufDequantize>> gguf_dequantize_ref() { return kKernels; }

}  // namespace bittern
