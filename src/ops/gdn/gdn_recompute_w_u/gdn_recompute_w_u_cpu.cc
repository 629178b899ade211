#include "bittern/ops/gdn_recompute_w_u.h"
#include "core/math.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"
#include "ops/gdn/gdn.h"
#include "ops/gdn/gdn_scratch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/gdn/gdn_recompute_w_u/gdn_recompute_w_u_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "cpu/tile-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = GdnRecomputeWU;

// Items [begin, end): chunks x heads.
void RunGdnRecomputeWU(const Op::Desc& d, const Op::Args& a, const GdnChunk* chunks,
                       std::int64_t begin, std::int64_t end, const cpu::gdn::RecomputeScratch& s) {
  const std::int64_t heads = d.value_heads;
  for (std::int64_t item = begin; item < end; ++item) {
    const GdnChunk chunk = chunks[item / heads];
    const std::int64_t h = item % heads, rows = chunk.rows;
    const std::int64_t first = chunk.begin * heads + h;
    tile::Load(a.a, first * d.chunk, heads * d.chunk, rows, rows, s.a, cpu::gdn::kRows);
    for (std::int64_t i = 0; i < rows; ++i) {
      s.beta[i] = a.beta.as<float>()[first + i * heads];
      s.decay[i] = math::exp(a.g.as<float>()[first + i * heads]);
    }
    // b, scaled in place and rounded, from the left by A.
    const auto product = [&](std::int64_t width, const MutView& out) HWY_ATTR {
      const std::int64_t stride = tile::Padded(width);
      tile::Round(d.element, s.scaled, stride, rows, width);
      const matmul::Left left{s.a, cpu::gdn::kRows};
      if (d.lower_triangular) {
        matmul::MultiplyLower(rows, width, left, s.scaled, stride, s.product, stride);
      } else {
        matmul::Multiply(rows, width, rows, left, s.scaled, stride, s.product, stride);
      }
      tile::Store(s.product, stride, rows, width, out, first * width, heads * width);
    };
    if (a.u) {
      const std::int64_t stride = tile::Padded(d.value_dim);
      tile::Load(a.v, first * d.value_dim, heads * d.value_dim, rows, d.value_dim, s.scaled,
                 stride);
      tile::ScaleRows(s.beta, s.scaled, stride, rows, d.value_dim);
      product(d.value_dim, a.u);
    }
    if (a.w) {
      const std::int64_t stride = tile::Padded(d.key_dim);
      tile::Load(a.k, (chunk.begin * d.key_heads + d.key_head(h)) * d.key_dim,
                 d.key_heads * d.key_dim, rows, d.key_dim, s.scaled, stride);
      tile::ScaleRows(s.beta, s.scaled, stride, rows, d.key_dim);
      tile::ScaleRows(s.decay, s.scaled, stride, rows, d.key_dim);
      product(d.key_dim, a.w);
    }
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD

#if HWY_ONCE
namespace bittern {
namespace {

using Op = GdnRecomputeWU;
using Scratch = cpu::gdn::RecomputeScratch;
BITTERN_EXPORT(RunGdnRecomputeWU);

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace workspace) {
  return cpu::gdn::run_chunks<Scratch>(d, a, workspace, BITTERN_CALL(RunGdnRecomputeWU));
}

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run, cpu::gdn::scratch_bytes<Scratch>)};

}  // namespace

std::span<const Kernel<GdnRecomputeWU>> gdn_recompute_w_u_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
