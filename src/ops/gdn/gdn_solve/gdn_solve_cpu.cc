#include "bittern/ops/gdn_solve.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"
#include "ops/gdn/gdn.h"
#include "ops/gdn/gdn_scratch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/gdn/gdn_solve/gdn_solve_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "ops/gdn/gdn-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = GdnSolve;
using gdn::kRows;

// Items [begin, end): chunks x heads.
void RunGdnSolve(const Op::Desc& d, const Op::Args& a, const GdnChunk* chunks, std::int64_t begin,
                 std::int64_t end, const cpu::gdn::SolveScratch& s) {
  const std::int64_t heads = d.value_heads;
  for (std::int64_t item = begin; item < end; ++item) {
    const GdnChunk chunk = chunks[item / heads];
    const std::int64_t rows = chunk.rows, first = chunk.begin * heads + item % heads;
    tile::Load(a.l, first * d.chunk, heads * d.chunk, rows, rows, s.l, kRows);
    std::fill_n(s.a, rows * kRows, 0.0f);
    for (std::int64_t i = 0; i < rows; ++i) s.a[i * kRows + i] = 1;
    matmul::SolveLower(rows, rows, {s.l, kRows}, s.a, kRows);
    // A NaN of L may have come above the diagonal in a vector's other lanes.
    for (std::int64_t i = 0; i < rows; ++i)
      std::fill(s.a + i * kRows + i + 1, s.a + (i + 1) * kRows, 0.0f);
    tile::Store(s.a, kRows, rows, d.chunk, a.a, first * d.chunk, heads * d.chunk);
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

using Op = GdnSolve;
using Scratch = cpu::gdn::SolveScratch;
BITTERN_EXPORT(RunGdnSolve);

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace workspace) {
  return cpu::gdn::run_chunks<Scratch>(d, a, workspace, BITTERN_CALL(RunGdnSolve));
}

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run, cpu::gdn::scratch_bytes<Scratch>)};

}  // namespace

std::span<const Kernel<GdnSolve>> gdn_solve_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
