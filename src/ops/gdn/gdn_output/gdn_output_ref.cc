#include "bittern/ops/gdn_output.h"
#include "ops/gdn/gdn.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = GdnOutput;

template <class X>
void run_as(const Op::Desc& d, const Op::Args& a) {
  const std::int64_t heads = d.value_heads, size = d.key_dim * d.value_dim;
  const bool key_first = d.state_layout == StateLayout::key_value;
  const float* g = a.g.as<float>();
  for (const GdnChunk& chunk : gdn_chunks(d, a.cu_seqlens)) {
    for (std::int64_t h = 0; h < heads; ++h) {
      const X* state = a.h.as<X>() + (chunk.state * heads + h) * size;
      const auto token = [&](std::int64_t i) { return (chunk.begin + i) * heads + h; };
      const auto key = [&](const ConstView& x, std::int64_t i) {
        return x.as<X>() + ((chunk.begin + i) * d.key_heads + d.key_head(h)) * d.key_dim;
      };
      for (std::int64_t i = 0; i < chunk.rows; ++i) {
        std::vector<float> p;
        for (std::int64_t j = 0; j <= i; ++j) {
          float dot = 0;
          for (std::int64_t m = 0; m < d.key_dim; ++m)
            dot = std::fma(to_math(key(a.q, i)[m]), to_math(key(a.k, j)[m]), dot);
          p.push_back(to_math(from_math<X>(dot * gdn_decay(g[token(i)], g[token(j)]))));
        }
        for (std::int64_t c = 0; c < d.value_dim; ++c) {
          float acc = 0;
          for (std::int64_t m = 0; m < d.key_dim; ++m) {
            const X s = state[key_first ? m * d.value_dim + c : c * d.key_dim + m];
            acc = std::fma(to_math(key(a.q, i)[m]), to_math(s), acc);
          }
          acc = math::exp(g[token(i)]) * acc;
          for (std::int64_t j = 0; j <= i; ++j)
            acc = std::fma(p[static_cast<std::size_t>(j)],
                           to_math(a.v_new.as<X>()[token(j) * d.value_dim + c]), acc);
          a.o.as<X>()[token(i) * d.value_dim + c] = from_math<X>(d.query_scale() * acc);
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

std::span<const Kernel<GdnOutput>> gdn_output_ref() { return kKernels; }

}  // namespace bittern
