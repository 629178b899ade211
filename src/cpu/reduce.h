// How sums by the halving tree are cut into blocks and tasks; the arithmetic is in reduce-inl.h.
#pragma once
#include <algorithm>
#include <cstdint>

#include "bittern/quantize_desc.h"
#include "cpu/parallel.h"

namespace bittern::cpu {

// A block of partial sums and its neighbours stay in L1, a stack of them in L2.
inline constexpr std::int64_t kBlockLanes = 2048;

// n terms of each of `columns` parameters, a matrix [n, columns], cut into blocks of `rows` rows
// (a power of two), the last one padded with zeros. `sums` such matrices lie behind each other.
struct BlockShape {
  std::int64_t n, columns, sums, rows, blocks;

  // columns * sums <= kBlockLanes
  BlockShape(std::int64_t terms, std::int64_t column_count, std::int64_t sum_count)
      : n(terms), columns(column_count), sums(sum_count), rows(1) {
    while (rows < n && 2 * rows * columns * sums <= kBlockLanes) rows *= 2;
    blocks = (n + rows - 1) / rows;
  }
  std::int64_t lanes() const { return rows * columns * sums; }
};

// Sums over the elements of each parameter. Runs of at most kShortRun elements are summed whole,
// many of them in a tile. Others go by blocks: parameters in units of `columns` consecutive ones,
// and, where there are fewer units than threads, the tree of a unit in `split` subtrees.
struct SumPlan {
  static constexpr std::int64_t kShortRun = 2048;
  static constexpr std::int64_t kColumns = 512;
  static constexpr std::int64_t kGrain = 1 << 16;  // elements

  GroupGeometry g;
  bool short_runs;
  std::int64_t n = 0;  // elements per parameter
  std::int64_t columns = 1, units = 0, split = 1;
  std::int64_t tasks, grain;

  // `dense`: all operands' rows follow each other without gaps.
  SumPlan(const GroupGeometry& geometry, bool dense, std::int64_t sums) : g(geometry) {
    if (dense && g.param_step == 0 && g.run == g.row_length) {  // one parameter: one row
      g.row_length *= g.rows;
      g.run = g.row_length;
      g.rows = 1;
    }
    n = g.row_length == 0 ? 0 : g.count();
    short_runs = g.param_step != 0 && n != 0 && g.run <= kShortRun;
    if (short_runs) {
      tasks = g.params;
      grain = kGrain / g.run;
      return;
    }
    if (g.param_step == 0 && g.run == 1) columns = std::clamp<std::int64_t>(g.params, 1, kColumns);
    units = (g.params + columns - 1) / columns;
    const BlockShape shape(n, columns, sums);
    const std::int64_t least = grain_ignored() ? 1 : kGrain;
    while (units * split < 4 * num_threads() && num_threads() > 1 && 2 * split <= shape.blocks &&
           n * columns / (2 * split) >= least)
      split *= 2;
    tasks = units * split;
    grain = kGrain / std::max<std::int64_t>(n * columns / split, 1);
  }

  std::int64_t columns_of(std::int64_t unit) const {
    return std::min(columns, g.params - unit * columns);
  }
  // Where the subtrees leave their partial sums.
  std::int64_t partial_lanes() const { return split > 1 ? tasks * kBlockLanes : 0; }
};

}  // namespace bittern::cpu
