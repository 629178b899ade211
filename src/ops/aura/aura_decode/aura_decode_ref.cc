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
    return visit<float, f16>(d.norm_element(), [&]<class N>(Type<N>) {
      const float* codebook = a.codebook.as<float>();
      std::vector<float> row(static_cast<std::size_t>(d.axis_size));
      for (std::int64_t i = 0; i < d.outer_size; ++i) {
        const std::uint32_t* packed = a.packed.as<std::uint32_t>() + i * a.packed.row_stride();
        const float norm = to_math(a.norms.as<N>()[i * a.norms.row_stride()]);
        for (std::int64_t j = 0; j < d.axis_size; ++j)
          row[static_cast<std::size_t>(j)] = norm * codebook[packed_code(packed, j, d.bits)];
        if (!d.rotated) {
          rotate_row(d.rotation, d.axis_size, a.table.as<float>(), true, row.data());
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
