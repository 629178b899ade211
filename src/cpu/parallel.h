// Splits work over the OpenMP team in fixed contiguous ranges.
#pragma once
#include <algorithm>
#include <cstdint>

#include "bittern/device.h"
#include "core/float_mode.h"

namespace bittern::cpu {

// Elements of an elementwise op that are worth another thread.
inline constexpr std::int64_t kGrain = 1 << 16;

// For the oracle: split however small the work is.
bool grain_ignored();
void ignore_grain(bool ignore);

// Before a team starts: from then on a child that is forked has one thread (threads.cc).
void mind_forks();

// Calls f(begin, end) on disjoint ranges that cover [0, n), at most one per thread and none shorter
// than `grain` (a team costs microseconds to wake). Boundaries fall on multiples of `align`. f must
// not throw. Since f writes what belongs to its range alone, results cannot depend on the split.
template <class F>
void parallel(std::int64_t n, std::int64_t grain, F&& f, std::int64_t align = 1) {
  if (n <= 0) return;
  if (grain < 1 || grain_ignored()) grain = 1;
  const std::int64_t team = std::min<std::int64_t>(num_threads(), n / grain);
  if (team <= 1) {
    const FloatMode mode;
    f(std::int64_t{0}, n);
    return;
  }
  const std::int64_t blocks = (n + align - 1) / align;
  const auto edge = [&](std::int64_t t) {
    // blocks * t / team without overflow
    const std::int64_t whole = blocks / team * t + blocks % team * t / team;
    return std::min(n, whole * align);
  };
  mind_forks();
#pragma omp parallel for num_threads(static_cast<int>(team)) schedule(static, 1)
  for (std::int64_t t = 0; t < team; ++t) {
    const FloatMode mode;
    if (edge(t) < edge(t + 1)) f(edge(t), edge(t + 1));
  }
}

// Calls f(slot, begin, end) on disjoint ranges that cover [0, n), where no two calls that run at
// once have the same slot < slots: for work that needs scratch, of which there are `slots`.
template <class F>
void parallel_slots(std::int64_t n, std::int64_t slots, F&& f) {
  const std::int64_t count =
      std::max<std::int64_t>(std::min({n, slots, std::int64_t{num_threads()}}), 1);
  const auto edge = [&](std::int64_t slot) { return n / count * slot + n % count * slot / count; };
  parallel(count, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t slot = first; slot < last; ++slot)
      if (edge(slot) < edge(slot + 1)) f(slot, edge(slot), edge(slot + 1));
  });
}

}  // namespace bittern::cpu
