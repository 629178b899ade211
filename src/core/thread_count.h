// How many threads the plans that one thread runs may use. cpu/threads.cc has the definitions.
#pragma once
#include <string_view>

#include "bittern/status.h"

namespace bittern {

// Whether a plan may have `threads`: 0 (as num_threads() says) or what set_num_threads takes.
Status check_plan_threads(std::string_view op, int threads);

// While one lives, num_threads() is `threads` on this thread; 0 changes nothing. Inside a parallel
// region it is 1 whatever was asked for: plans do not nest.
class [[nodiscard]] ThreadCount {
 public:
  explicit ThreadCount(int threads) noexcept;
  ~ThreadCount();
  ThreadCount(const ThreadCount&) = delete;
  ThreadCount& operator=(const ThreadCount&) = delete;

 private:
  const int before_;
};

}  // namespace bittern
