// Runs of rows on all threads.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "bittern/device.h"
#include "bittern/status.h"
#include "cpu/parallel.h"

namespace bittern {

// Calls f(i, state) for i in [0, runs) on all threads, each with its own state. Returns the error
// of the first i that fails; calls that have not begun by then are skipped.
template <class State, class F>
Status for_runs(std::int64_t runs, std::vector<State>& states, const F& f) {
  const std::int64_t slots = std::clamp<std::int64_t>(runs, 1, num_threads());
  states.resize(static_cast<std::size_t>(slots));
  return cpu::parallel_queue(runs, slots, [&](std::int64_t i, std::int64_t slot) {
    return f(i, states[static_cast<std::size_t>(slot)]);
  });
}

}  // namespace bittern
