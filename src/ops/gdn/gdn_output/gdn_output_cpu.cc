#include "bittern/ops/gdn_output.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"
#include "ops/gdn/gdn.h"
#include "ops/gdn/gdn_scratch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/gdn/gdn_output/gdn_output_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "ops/gdn/gdn-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = GdnOutput;
using gdn::kRows;

// Items [begin, end): chunks x heads. Value heads of one key head share its products.
void RunGdnOutput(const Op::Desc& d, const Op::Args& a, const GdnChunk* chunks, std::int64_t begin,
                  std::int64_t end, const cpu::gdn::OutputScratch& s) {
  const std::int64_t heads = d.value_heads, state_size = d.key_dim * d.value_dim;
  const std::int64_t k_stride = gdn::Padded(d.key_dim), v_stride = gdn::Padded(d.value_dim);
  std::int64_t done_chunk = -1, done_head = -1;
  for (std::int64_t item = begin; item < end; ++item) {
    const GdnChunk chunk = chunks[item / heads];
    const std::int64_t h = item % heads, key_head = d.key_head(h), rows = chunk.rows;
    const std::int64_t first = chunk.begin * heads + h;
    if (done_chunk != item / heads || done_head != key_head) {
      const std::int64_t key_at = (chunk.begin * d.key_heads + key_head) * d.key_dim;
      const std::int64_t key_step = d.key_heads * d.key_dim;
      tile::Load(a.k, key_at, key_step, rows, d.key_dim, s.q, k_stride);
      gdn::Transpose(s.q, k_stride, rows, d.key_dim, s.k_transposed, kRows);
      tile::Load(a.q, key_at, key_step, rows, d.key_dim, s.q, k_stride);
      matmul::MultiplyToLower(rows, d.key_dim, {s.q, k_stride}, s.k_transposed, kRows, s.qk, kRows);
      done_chunk = item / heads;
      done_head = key_head;
    }
    gdn::LoadRow(a.g, chunk, h, s.g);
    gdn::Decay(rows, rows, nullptr, s.g, true, s.qk, s.p);
    tile::Round(d.element, s.p, kRows, rows, rows);
    gdn::ExpRow(s.g, s.decay);
    tile::WithElement(d.element, [&]<class X>(Type<X>) HWY_ATTR {
      gdn::LoadState(d, a.h.as<X>() + (chunk.state * heads + h) * state_size, s.state);
    });
    tile::Load(a.v_new, first * d.value_dim, heads * d.value_dim, rows, d.value_dim, s.v, v_stride);
    matmul::Multiply(rows, d.value_dim, d.key_dim, {s.q, k_stride}, s.state, v_stride, s.o,
                     v_stride);
    tile::ScaleRows(s.decay, s.o, v_stride, rows, d.value_dim);
    matmul::MultiplyLower(rows, d.value_dim, {s.p, kRows}, s.v, v_stride, s.o, v_stride, true);
    tile::Scale(d.query_scale(), s.o, rows * v_stride);
    tile::Store(s.o, v_stride, rows, d.value_dim, a.o, first * d.value_dim, heads * d.value_dim);
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

using Op = GdnOutput;
using Scratch = cpu::gdn::OutputScratch;
BITTERN_EXPORT(RunGdnOutput);

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace workspace) {
  return cpu::gdn::run_chunks<Scratch>(d, a, workspace, BITTERN_CALL(RunGdnOutput));
}

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run, cpu::gdn::scratch_bytes<Scratch>)};

}  // namespace

std::span<const Kernel<GdnOutput>> gdn_output_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
