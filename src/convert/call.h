// What holds while a call of bittern/convert.h runs.
#pragma once
#include <optional>

#include "core/float_mode.h"
#include "core/thread_count.h"

namespace bittern {

// The number of threads, and the floating-point mode in which results are the same everywhere.
class CallSettings {
 public:
  explicit CallSettings(const std::optional<int>& threads) : threads_(threads.value_or(0)) {}

 private:
  const ThreadCount threads_;
  const FloatMode mode_;
};

}  // namespace bittern
