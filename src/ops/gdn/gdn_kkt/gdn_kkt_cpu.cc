#include "bittern/ops/gdn_kkt.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"
#include "ops/gdn/gdn.h"
#include "ops/gdn/gdn_scratch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/gdn/gdn_kkt/gdn_kkt_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "ops/gdn/gdn-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = GdnKkt;
using gdn::kRows;

// Items [begin, end): chunks x heads. Value heads of one key head share its products.
void RunGdnKkt(const Op::Desc& d, const Op::Args& a, const GdnChunk* chunks, std::int64_t begin,
               std::int64_t end, const cpu::gdn::KktScratch& s) {
  const std::int64_t heads = d.value_heads, stride = gdn::Padded(d.key_dim);
  std::int64_t done_chunk = -1, done_head = -1;
  for (std::int64_t item = begin; item < end; ++item) {
    const GdnChunk chunk = chunks[item / heads];
    const std::int64_t h = item % heads, key_head = d.key_head(h), rows = chunk.rows;
    const std::int64_t first = chunk.begin * heads + h;
    if (done_chunk != item / heads || done_head != key_head) {
      tile::Load(a.k, (chunk.begin * d.key_heads + key_head) * d.key_dim, d.key_heads * d.key_dim,
                 rows, d.key_dim, s.k, stride);
      gdn::Transpose(s.k, stride, rows, d.key_dim, s.k_transposed, kRows);
      matmul::MultiplyToLower(rows, d.key_dim, {s.k, stride}, s.k_transposed, kRows, s.kk, kRows);
      done_chunk = item / heads;
      done_head = key_head;
    }
    gdn::LoadRow(a.beta, chunk, h, s.beta);
    gdn::LoadRow(a.g, chunk, h, s.g);
    gdn::Decay(rows, d.chunk, s.beta, s.g, false, s.kk, s.l);
    tile::Store(s.l, kRows, rows, d.chunk, a.l, first * d.chunk, heads * d.chunk);
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

using Op = GdnKkt;
using Scratch = cpu::gdn::KktScratch;
BITTERN_EXPORT(RunGdnKkt);

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace workspace) {
  return cpu::gdn::run_chunks<Scratch>(d, a, workspace, BITTERN_CALL(RunGdnKkt));
}

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run, cpu::gdn::scratch_bytes<Scratch>)};

}  // namespace

std::span<const Kernel<GdnKkt>> gdn_kkt_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
