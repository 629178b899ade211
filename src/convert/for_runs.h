// Runs of rows on all threads.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

#include "bittern/device.h"
#include "bittern/status.h"

namespace bittern {

// f(i, state) for i in [0, runs) on all threads, each of which has a state of its own. The first i
// that fails is the answer; what has not begun by then is left out.
template <class State, class F>
Status for_runs(std::int64_t runs, std::vector<State>& states, const F& f) {
  const int threads = static_cast<int>(std::clamp<std::int64_t>(runs, 1, num_threads()));
  states.resize(static_cast<std::size_t>(threads));
  std::atomic<std::size_t> begun = 0;
  std::atomic<std::int64_t> failed = runs;
  Status failure;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    State& state = states[begun++];
#pragma omp for schedule(dynamic)
    for (std::int64_t i = 0; i < runs; ++i) {
      if (failed < i) continue;
      Status status;
      try {
        status = f(i, state);
      } catch (const std::bad_alloc&) {
        status = unavailable("not enough memory for a run of rows");
      }
      if (status.ok()) continue;
#pragma omp critical(bittern_failure)
      if (i < failed) {
        failed = i;
        failure = status;
      }
    }
  }
  return failure;
}

}  // namespace bittern
