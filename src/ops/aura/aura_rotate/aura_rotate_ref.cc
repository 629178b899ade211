#include <vector>

#include "bittern/ops/aura_rotate.h"
#include "ops/aura/aura.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = AuraRotate;

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  return visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    std::vector<float> row(static_cast<std::size_t>(d.dim));
    for (std::int64_t i = 0; i < d.rows; ++i) {
      const X* x = a.x.as<X>() + i * a.x.row_stride();
      X* y = a.y.as<X>() + i * a.y.row_stride();
      for (std::size_t j = 0; j < row.size(); ++j) row[j] = to_math(x[j]);
      rotate_row(d.rotation, d.dim, a.table.as<float>(), d.inverse, row.data());
      for (std::size_t j = 0; j < row.size(); ++j) y[j] = from_math<X>(row[j]);
    }
    return Status();
  });
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<AuraRotate>> aura_rotate_ref() { return kKernels; }

}  // namespace bittern
