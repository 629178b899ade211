#include "bittern/ops/gdn_kkt.h"
#include "ops/gdn/gdn.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = GdnKkt;

template <class X>
void run_as(const Op::Desc& d, const Op::Args& a) {
  const float* beta = a.beta.as<float>();
  const float* g = a.g.as<float>();
  for (const GdnChunk& chunk : gdn_chunks(d, a.cu_seqlens)) {
    for (std::int64_t h = 0; h < d.value_heads; ++h) {
      const auto key = [&](std::int64_t i) {
        return a.k.as<X>() + ((chunk.begin + i) * d.key_heads + d.key_head(h)) * d.key_dim;
      };
      const auto at = [&](std::int64_t i) { return (chunk.begin + i) * d.value_heads + h; };
      for (std::int64_t i = 0; i < chunk.rows; ++i) {
        float* row = a.l.as<float>() + at(i) * d.chunk;
        for (std::int64_t j = 0; j < d.chunk; ++j) {
          row[j] = 0;
          if (j >= i) continue;
          float dot = 0;
          for (std::int64_t c = 0; c < d.key_dim; ++c)
            dot = std::fma(to_math(key(i)[c]), to_math(key(j)[c]), dot);
          row[j] = beta[at(i)] * dot * gdn_decay(g[at(i)], g[at(j)]);
        }
      }
    }
  }
}

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  return visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    run_as<X>(d, a);
    return Status();
  });
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<GdnKkt>> gdn_kkt_ref() { return kKernels; }

}  // namespace bittern
