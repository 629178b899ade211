#include "bittern/ops/gdn_solve.h"
#include "ops/gdn/gdn.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = GdnSolve;

template <class M>
void run_as(const Op::Desc& d, const Op::Args& a) {
  for (const GdnChunk& chunk : gdn_chunks(d, a.cu_seqlens)) {
    const auto n = static_cast<std::size_t>(chunk.rows);
    for (std::int64_t h = 0; h < d.value_heads; ++h) {
      const auto at = [&](std::size_t i) {
        return ((chunk.begin + static_cast<std::int64_t>(i)) * d.value_heads + h) * d.chunk;
      };
      std::vector<std::vector<float>> rows(n, std::vector<float>(n));
      for (std::size_t i = 0; i < n; ++i) {
        const float* l = a.l.as<float>() + at(i);
        for (std::size_t c = 0; c < n; ++c) {
          float acc = 0;
          for (std::size_t j = 0; j < i; ++j) acc = std::fma(l[j], rows[j][c], acc);
          rows[i][c] = (c == i ? 1.0f : 0.0f) - acc;
        }
        for (std::size_t c = 0; c < static_cast<std::size_t>(d.chunk); ++c)
          a.a.as<M>()[at(i) + static_cast<std::int64_t>(c)] =
              from_math<M>(c <= i ? rows[i][c] : 0.0f);
      }
    }
  }
}

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  return visit<float, bf16>(d.a_element, [&]<class M>(Type<M>) {
    run_as<M>(d, a);
    return Status();
  });
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<GdnSolve>> gdn_solve_ref() { return kKernels; }

}  // namespace bittern
