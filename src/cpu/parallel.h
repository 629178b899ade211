// Splits work over the OpenMP team: in fixed contiguous ranges, or as a queue.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <type_traits>
#include <utility>

#include "bittern/device.h"
#include "bittern/status.h"
#include "core/float_mode.h"
#include "core/guarded.h"

namespace bittern::cpu {

// Elements of an elementwise op that are worth another thread.
inline constexpr std::int64_t kGrain = 1 << 16;
// The same, or fewer while this thread's team is awake.
std::int64_t grain_now() noexcept;

// For the oracle: split however small the work is.
bool grain_ignored();
void ignore_grain(bool ignore);

// Calls call(context, t) for t in [0, team), each on a thread of its own. It must not throw.
void run_team(std::int64_t team, void (*call)(void* context, std::int64_t t), void* context);

// Calls f on this thread. Meanwhile its team stays awake, so that a region costs a tenth of a
// microsecond instead of one or two: for hundreds of short regions, one after another.
void keep_team_awake(void (*f)(void* context), void* context);
template <class F>
void keep_team_awake(F&& f) {
  keep_team_awake([](void* context) { (*static_cast<std::remove_reference_t<F>*>(context))(); },
                  const_cast<void*>(static_cast<const void*>(&f)));
}

// While one lives, this thread is one of a team's: num_threads() is 1, so that plans do not nest.
class [[nodiscard]] InRegion {
 public:
  InRegion() noexcept;
  ~InRegion();
  InRegion(const InRegion&) = delete;
  InRegion& operator=(const InRegion&) = delete;

 private:
  const bool before_;
};

// No exception may leave an OpenMP region: a thread that catches one keeps it here, and the caller
// throws the first of them again.
class FirstException {
 public:
  void keep() noexcept;  // inside a catch (...)
  void rethrow() const {
    if (first_ != nullptr) std::rethrow_exception(first_);
  }

 private:
  std::atomic_flag kept_;
  std::exception_ptr first_;
};

// Calls f(begin, end) on disjoint ranges that cover [0, n), at most one per thread and none shorter
// than `grain` (a team costs microseconds to wake). Boundaries fall on multiples of `align`. An
// exception of f reaches the caller once all ranges have ended. Since f writes what belongs to its
// range alone, results cannot depend on the split.
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
  FirstException thrown;
  auto part = [&](std::int64_t t) noexcept {
    const FloatMode mode;
    const InRegion region;
    try {
      if (edge(t) < edge(t + 1)) f(edge(t), edge(t + 1));
    } catch (...) {
      thrown.keep();
    }
  };
  run_team(
      team, [](void* context, std::int64_t t) { (*static_cast<decltype(part)*>(context))(t); },
      &part);
  thrown.rethrow();
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

// Calls f(i, slot) -> Status for i in [0, n), each on the thread that is free first, where no two
// calls that run at once have the same slot < slots. They begin in the order of i. Once one has
// failed, or thrown, none begins; the answer is that of the least i that did.
template <class F>
Status parallel_queue(std::int64_t n, std::int64_t slots, const F& f) {
  const std::int64_t team =
      std::max<std::int64_t>(std::min({n, slots, std::int64_t{num_threads()}}), 1);
  std::atomic<std::int64_t> next = 0, failed = n;
  std::mutex mutex;
  Status failure;
  auto work = [&](std::int64_t slot) noexcept {
    const FloatMode mode;
    for (std::int64_t i; (i = next++) < n && i < failed;) {
      Status status = guarded("", [&]() -> Status { return f(i, slot); });
      if (status.ok()) continue;
      const std::lock_guard lock(mutex);
      if (i >= failed) continue;
      failed = i;
      failure = std::move(status);
    }
  };
  if (team <= 1) {
    work(0);
    return failure;
  }
  run_team(
      team,
      [](void* context, std::int64_t slot) {
        const InRegion region;
        (*static_cast<decltype(work)*>(context))(slot);
      },
      &work);
  return failure;
}

}  // namespace bittern::cpu
