#include <vector>

#include "bittern/ops/aura_decode.h"
#include "core/numerics.h"
#include "ops/aura/aura.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = AuraDecode;

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  return visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    return visit<float, f16>(d.scale_element(), [&]<class N>(Type<N>) {
      const float* codebook = a.codebook.as<float>();
      std::vector<float> row(static_cast<std::size_t>(d.dim));
      for (std::int64_t i = 0; i < d.rows; ++i) {
        const std::uint32_t* packed = a.packed.as<std::uint32_t>() + i * a.packed.row_stride();
        const float scale = to_math(a.scales.as<N>()[i * a.scales.row_stride()]);
        for (std::int64_t j = 0; j < d.dim; ++j)
          row[static_cast<std::size_t>(j)] = scale * codebook[packed_code(packed, j, d.bits)];
        if (!d.rotated) {
          rotate_row(d.rotation, d.dim, a.table.as<float>(), true, row.data());
        }
        X* y = a.y.as<X>() + i * a.y.row_stride();
        for (std::size_t j = 0; j < row.size(); ++j) y[j] = from_math<X>(row[j]);
      }
      return Status();
    });
  });
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<AuraDecode>> aura_decode_ref() { return kKernels; }

}  // namespace bittern
