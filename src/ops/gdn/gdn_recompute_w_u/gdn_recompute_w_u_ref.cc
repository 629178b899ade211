#include "bittern/ops/gdn_recompute_w_u.h"
#include "core/math.h"
#include "core/numerics.h"
#include "ops/gdn/gdn.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = GdnRecomputeWU;

template <class X, class M>
void run_as(const Op::Desc& d, const Op::Args& a) {
  const std::int64_t heads = d.value_heads;
  // out[i] = X(sum of A[i][j] * b(j)) for the rows of a chunk, element by element.
  const auto product = [&](const GdnChunk& chunk, std::int64_t h, std::int64_t width, X* out,
                           auto&& b) {
    for (std::int64_t i = 0; i < chunk.rows; ++i) {
      const std::int64_t row = (chunk.begin + i) * heads + h;
      const M* matrix = a.a.as<M>() + row * d.chunk;
      for (std::int64_t c = 0; c < width; ++c) {
        float acc = 0;
        for (std::int64_t j = 0; j < (d.lower_triangular ? i + 1 : chunk.rows); ++j)
          acc = std::fma(to_math(matrix[j]), to_math(from_math<X>(b(chunk.begin + j, c))), acc);
        out[row * width + c] = from_math<X>(acc);
      }
    }
  };
  const float* beta = a.beta.as<float>();
  const float* g = a.g.as<float>();
  for (const GdnChunk& chunk : gdn_chunks(d, a.cu_seqlens)) {
    for (std::int64_t h = 0; h < heads; ++h) {
      if (a.u) {
        product(chunk, h, d.value_dim, a.u.as<X>(), [&](std::int64_t t, std::int64_t c) {
          const float v = to_math(a.v.as<X>()[(t * heads + h) * d.value_dim + c]);
          return v * beta[t * heads + h];
        });
      }
      if (a.w) {
        product(chunk, h, d.key_dim, a.w.as<X>(), [&](std::int64_t t, std::int64_t c) {
          const float k = to_math(a.k.as<X>()[(t * d.key_heads + d.key_head(h)) * d.key_dim + c]);
          return k * beta[t * heads + h] * math::exp(g[t * heads + h]);
        });
      }
    }
  }
}

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  return visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    return visit<float, bf16>(d.a_element, [&]<class M>(Type<M>) {
      run_as<X, M>(d, a);
      return Status();
    });
  });
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<GdnRecomputeWU>> gdn_recompute_w_u_ref() { return kKernels; }

}  // namespace bittern
