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

// f(i, state) for i in [0, runs) on all threads, each of which has a state of its own. The first i
// that fails is the answer; what has not begun by then is left out.
template <class State, class F>
Status for_runs(std::int64_t runs, std::vector<State>& states, const F& f) {
  const std::int64_t slots = std::clamp<std::int64_t>(runs, 1, num_threads());
  states.resize(static_cast<std::size_t>(slots));
  return cpu::parallel_queue(runs, slots, [&](std::int64_t i, std::int64_t slot) {
    return f(i, states[static_cast<std::size_t>(slot)]);
  });
}

}  // namespace bittern
