#include <omp.h>

#include <atomic>
#include <cstdlib>

#include "cpu/parallel.h"

namespace bittern {
namespace {

// Asked for once: the operating system takes microseconds to say how many cores there are.
int default_threads() {
  if (const char* text = std::getenv("BITTERN_THREADS")) {
    const int wanted = std::atoi(text);
    if (wanted >= 1) return wanted;
  }
  return omp_get_num_procs();
}

std::atomic<int> chosen{0};
std::atomic<bool> split_always{false};

}  // namespace

int num_threads() {
  static const int initial = default_threads();
  const int set = chosen.load(std::memory_order_relaxed);
  return set >= 1 ? set : initial;
}

void set_num_threads(int threads) { chosen.store(threads, std::memory_order_relaxed); }

namespace cpu {

bool grain_ignored() { return split_always.load(std::memory_order_relaxed); }
void ignore_grain(bool ignore) { split_always.store(ignore, std::memory_order_relaxed); }

}  // namespace cpu
}  // namespace bittern
