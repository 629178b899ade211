// How sums over the elements of each parameter are cut into tasks; the arithmetic is in
// group_sum-inl.h.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "bittern/quantize_desc.h"
#include "cpu/parallel.h"
#include "cpu/reduce.h"

namespace bittern::cpu {

// A left-out operand has no gaps.
template <class View>
bool dense_rows(const GroupGeometry& g, const View& v) {
  return v.data == nullptr || v.row_stride() == g.row_length;
}

// Rows that follow each other without gaps are as good as one, unless they share parameters.
inline GroupGeometry join_rows(GroupGeometry g) {
  if (g.param_step == 0 && g.run != g.row_length) return g;
  if (g.param_step == 0) g.run *= g.rows;
  g.param_step *= g.rows;
  g.row_length *= g.rows;
  g.rows = 1;
  return g;
}

// Sums over the elements of each parameter. Runs of at most kShortRun elements are summed whole,
// many of them in a tile. Others go by blocks: parameters in units of `columns` consecutive ones,
// and, where units are few, the tree of each in `split` subtrees.
struct SumPlan {
  static constexpr std::int64_t kShortRun = 2048;
  static constexpr std::int64_t kColumns = 512;

  GroupGeometry g;
  bool dense;  // rows follow each other without gaps in all operands
  bool short_runs;
  std::int64_t n;  // elements per parameter
  std::int64_t columns = 1, split = 1;
  std::int64_t tasks, grain;

  SumPlan(const GroupGeometry& geometry, bool rows_gap_free, std::int64_t sums)
      : g(rows_gap_free ? join_rows(geometry) : geometry), dense(rows_gap_free) {
    n = g.row_length == 0 ? 0 : g.count();
    short_runs = g.param_step != 0 && n != 0 && g.run <= kShortRun;
    if (short_runs) {
      tasks = g.params;
      grain = kGrain / g.run;
      return;
    }
    if (g.param_step == 0 && g.run == 1) columns = std::clamp<std::int64_t>(g.params, 1, kColumns);
    const std::int64_t units = (g.params + columns - 1) / columns;
    const std::int64_t blocks = BlockShape(n, columns, sums).blocks;
    const std::int64_t least = grain_ignored() ? 1 : kGrain;
    if (const std::int64_t threads = num_threads(); threads > 1) {
      while (units * split < 4 * threads && 2 * split <= blocks &&
             n * columns / (2 * split) >= least)
        split *= 2;
    }
    tasks = units * split;
    grain = kGrain / std::max<std::int64_t>(n * columns / split, 1);
  }

  std::int64_t units() const { return tasks / split; }
  std::int64_t columns_of(std::int64_t unit) const {
    return std::min(columns, g.params - unit * columns);
  }
  // Subtrees beyond the padded number of blocks would add zeros that the tree does not.
  std::int64_t split_of(const BlockShape& shape) const {
    std::int64_t s = split;
    while (s > 1 && s / 2 >= shape.blocks) s /= 2;
    return s;
  }
};

// Runs the tasks of `plan`, then joins the subtrees where units were split. `kernel` is
// GroupSums::Run of one op, behind its SIMD dispatch.
template <class Op>
using SumKernel = void(const typename Op::Desc&, const typename Op::Args&, const SumPlan&,
                       std::int64_t begin, std::int64_t end, void* partial);

template <class Op>
void run_sums(const SumPlan& plan, SumKernel<Op>& kernel, const typename Op::Desc& d,
              const typename Op::Args& a) {
  // The subtrees' partial sums, of either f32 or f64.
  std::vector<double> partial;
  if (plan.split > 1) partial.resize(static_cast<std::size_t>(plan.tasks * kBlockLanes));
  parallel(plan.tasks, plan.grain, [&](std::int64_t begin, std::int64_t end) {
    kernel(d, a, plan, begin, end, partial.data());
  });
  if (plan.split > 1) kernel(d, a, plan, plan.tasks, plan.tasks, partial.data());
}

}  // namespace bittern::cpu
