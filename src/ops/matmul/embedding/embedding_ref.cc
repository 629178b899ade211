#include "bittern/ops/embedding.h"
#include "ops/matmul/weights.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = Embedding;

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  return visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    for (std::int64_t i = 0; i < d.rows; ++i) {
      const matmul::StoredRow row = matmul::read_row(d.weights, a, a.ids.as<std::int32_t>()[i]);
      for (std::int64_t k = 0; k < d.weights.inputs; ++k) {
        const float value = matmul::weight_of(d.weights, row, k).value;
        a.y.as<X>()[i * a.y.row_stride() + k] = from_math<X>(value);
      }
    }
    return Status();
  });
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<Embedding>> embedding_ref() { return kKernels; }

}  // namespace bittern
