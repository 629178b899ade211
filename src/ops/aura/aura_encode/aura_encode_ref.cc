#include <vector>

#include "bittern/ops/aura_encode.h"
#include "ops/aura/encode_ref.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = AuraEncode;

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  return visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    return visit<float, f16>(d.scale_element(), [&]<class N>(Type<N>) {
      const auto n = static_cast<std::size_t>(d.dim);
      std::vector<float> row(n);
      std::vector<std::uint32_t> codes(n);
      for (std::int64_t i = 0; i < d.rows; ++i) {
        const X* x = a.x.as<X>() + i * a.x.row_stride();
        for (std::size_t j = 0; j < n; ++j) row[j] = to_math(x[j]);
        a.scales.as<N>()[i * a.scales.row_stride()] =
            stored_scale<N>(encode_row(d, a.table.as<float>(), a.boundaries.as<float>(),
                                       a.codebook.as<float>(), row.data(), codes.data()));
        pack_row(d, codes.data(), a.packed.as<std::uint32_t>() + i * a.packed.row_stride());
      }
      return Status();
    });
  });
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<AuraEncode>> aura_encode_ref() { return kKernels; }

}  // namespace bittern
