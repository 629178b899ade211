#include "bittern/ops/gdn_cumsum.h"
#include "ops/gdn/gdn.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = GdnCumsum;

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  for (const GdnChunk& chunk : gdn_chunks(d, a.cu_seqlens)) {
    for (std::int64_t h = 0; h < d.value_heads; ++h) {
      float sum = 0;
      for (std::int64_t t = chunk.begin; t < chunk.begin + chunk.rows; ++t) {
        float g = a.g.as<float>()[t * d.value_heads + h];
        if (d.gate) g = gdn_log_decay(g, a.a_log.as<float>()[h], a.dt_bias.as<float>()[h]);
        sum += g;
        a.sum.as<float>()[t * d.value_heads + h] = sum;
      }
    }
  }
  return {};
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<GdnCumsum>> gdn_cumsum_ref() { return kKernels; }

}  // namespace bittern
