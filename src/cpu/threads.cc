#include <omp.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "bittern/environment.h"
#include "core/environment.h"
#include "core/guarded.h"
#include "core/thread_count.h"
#include "cpu/dispatch.h"
#include "cpu/parallel.h"
#include "hwy/cache_control.h"

namespace bittern {
namespace {

// Asked for once: the operating system takes microseconds to say how many cores there are.
int cores() noexcept {
  static const int count = omp_get_num_procs();
  return count;
}

// How many threads, including the caller, this process may have at once, up to `wanted`. OpenMP's
// runtime ends the process if the system gives it fewer than it asks for, so this tries them first.
int can_start(int wanted) {
  static std::atomic<int> known{1};
  if (wanted <= known.load()) return wanted;
  std::mutex mutex;
  std::condition_variable end;
  bool ended = false;
  std::vector<std::thread> threads;
  threads.reserve(static_cast<std::size_t>(wanted));
  std::exception_ptr no_memory;  // which says nothing about the system's limit
  try {
    while (static_cast<int>(threads.size()) + 1 < wanted) {
      threads.emplace_back([&] {
        std::unique_lock lock(mutex);
        end.wait(lock, [&] { return ended; });
      });
    }
  } catch (const std::system_error&) {  // the system's limit
  } catch (const std::bad_alloc&) {
    no_memory = std::current_exception();
  }
  {
    const std::lock_guard lock(mutex);
    ended = true;
  }
  end.notify_all();
  for (std::thread& thread : threads) thread.join();
  if (no_memory != nullptr) std::rethrow_exception(no_memory);
  const int started = static_cast<int>(threads.size()) + 1;
  int before = known.load();
  while (before < started && !known.compare_exchange_weak(before, started)) {
  }
  return started;
}

std::string accepted() { return "an integer 1.." + std::to_string(max_threads()); }

Status check_count(std::string_view what, int threads) {
  if (threads > max_threads()) {
    return invalid(std::string(what).append(": ") + std::to_string(threads) + ", expected " +
                   accepted());
  }
  const int most = can_start(threads);
  if (most >= threads) return {};
  return invalid(std::string(what).append(": ") + std::to_string(threads) +
                 " threads; the system lets this process start " + std::to_string(most));
}

struct Default {
  int threads;
  Status status;
};

Default read_default() {
  constexpr std::string_view kName = "BITTERN_THREADS";
  const int fallback = can_start(cores());
  const char* given = std::getenv(kName.data());
  if (given == nullptr) return {fallback, {}};
  const std::string_view text = given;
  int wanted = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), wanted);
  if (error != std::errc() || end != text.data() + text.size() || wanted < 1) {
    return {fallback, invalid(std::string(kName)
                                  .append(": ")
                                  .append(text.empty() ? "empty" : text)
                                  .append(", expected ") +
                              accepted())};
  }
  Status status = check_count(kName, wanted);
  const int threads = status.ok() ? wanted : fallback;
  return {threads, std::move(status)};
}

// Without memory to read them: one thread, until there is some.
const Default& defaults() noexcept {
  static const Default none{1, Status::out_of_memory()};
  try {
    static const auto* const read = [] {
      Default made = read_default();
      throw_if_out_of_memory(made.status);
      return new Default(std::move(made));
    }();
    return *read;
  } catch (...) {
    return none;
  }
}

std::atomic<int> chosen{0};
std::atomic<int> refused{0};  // what set_num_threads was last asked for in vain
std::atomic<bool> split_always{false};
std::atomic<bool> orphaned{false};  // a child whose parent's team it cannot wake
thread_local int plan_threads = 0;  // of the plan that this thread runs; 0: none says
thread_local bool in_region = false;

}  // namespace

int max_threads() noexcept { return std::max(256, cores()); }

int num_threads() noexcept {
  if (in_region || orphaned.load(std::memory_order_relaxed)) return 1;
  if (plan_threads >= 1) return plan_threads;
  const int set = chosen.load(std::memory_order_relaxed);
  return set >= 1 ? set : defaults().threads;
}

ThreadCount::ThreadCount(int threads) noexcept : before_(plan_threads) {
  if (threads >= 1) plan_threads = threads;
}
ThreadCount::~ThreadCount() { plan_threads = before_; }

Status check_num_threads(int threads) noexcept {
  return guarded("num_threads", [&] { return check_count("num_threads", threads); });
}

Status check_plan_threads(std::string_view op, int threads) {
  if (threads == 0) return {};
  const std::string what = std::string(op).append(": threads");
  if (threads < 0) {
    return invalid(what + ": " + std::to_string(threads) +
                   ", expected 0 (as num_threads says) or " + accepted());
  }
  return check_count(what, threads);
}

void set_num_threads(int threads) noexcept {
  const bool ok = check_num_threads(threads).ok();
  refused.store(ok ? 0 : threads, std::memory_order_relaxed);
  if (ok) chosen.store(threads, std::memory_order_relaxed);
}

Status check_environment() noexcept {
  return guarded("environment", []() -> Status {
    BITTERN_TRY(defaults().status);
    if (const int threads = refused.load(std::memory_order_relaxed); threads != 0)
      BITTERN_TRY(check_num_threads(threads));
    BITTERN_TRY(check_cuda_plugin_variable());
    return cpu::check_isa_variable();
  });
}

namespace cpu {

InRegion::InRegion() noexcept : before_(std::exchange(in_region, true)) {}
InRegion::~InRegion() { in_region = before_; }

void FirstException::keep() noexcept {
  if (!kept_.test_and_set()) first_ = std::current_exception();
}

bool grain_ignored() { return split_always.load(std::memory_order_relaxed); }
void ignore_grain(bool ignore) { split_always.store(ignore, std::memory_order_relaxed); }

namespace {

// GCC's runtime keeps a team's threads for the next team. In a forked child it waits for them too,
// although they do not exist there: from the first team on, such a child has one thread.
void mind_forks() {
  [[maybe_unused]] static const int registered =
      pthread_atfork(nullptr, nullptr, [] { orphaned.store(true, std::memory_order_relaxed); });
}

// Threads that wait for the next region in a loop.
class AwakeTeam {
 public:
  std::int64_t size() const { return workers_ + 1; }
  void set_size(std::int64_t size) { workers_ = size - 1; }

  // Of the caller: a region of up to size() threads.
  void run(std::int64_t team, void (*call)(void*, std::int64_t), void* context) {
    call_ = call;
    context_ = context;
    team_ = team;
    busy_.store(workers_, std::memory_order_relaxed);
    region_.fetch_add(1, std::memory_order_release);
    call(context, 0);
    wait([&] { return busy_.load(std::memory_order_acquire) == 0; });
  }
  void end() {
    run(0, [](void*, std::int64_t) {}, nullptr);
  }

  // Of another thread: takes its part in all regions until the end.
  void work(std::int64_t index) {
    for (std::uint64_t seen = 0;; ++seen) {
      wait([&] { return region_.load(std::memory_order_acquire) != seen; });
      const std::int64_t team = team_;
      if (index < team) call_(context_, index);
      busy_.fetch_sub(1, std::memory_order_release);
      if (team == 0) return;
    }
  }

 private:
  template <class Ready>
  static void wait(const Ready& ready) {
    constexpr int kPatience = 1 << 14;  // some hundred microseconds; then others may have the core
    for (int i = 0; !ready(); ++i) {
      if (i < kPatience) {
        hwy::Pause();
      } else {
        sched_yield();
      }
    }
  }

  void (*call_)(void*, std::int64_t) = nullptr;
  void* context_ = nullptr;
  std::int64_t team_ = 0;
  std::int64_t workers_ = 0;
  alignas(64) std::atomic<std::uint64_t> region_{0};
  alignas(64) std::atomic<std::int64_t> busy_{0};
};

thread_local AwakeTeam* awake = nullptr;  // of this thread

}  // namespace

std::int64_t grain_now() noexcept { return awake != nullptr ? kGrain / 16 : kGrain; }

void run_team(std::int64_t team, void (*call)(void* context, std::int64_t t), void* context) {
  if (awake != nullptr && team <= awake->size()) return awake->run(team, call, context);
  mind_forks();
#pragma omp parallel for num_threads(static_cast<int>(team)) schedule(static, 1)
  for (std::int64_t t = 0; t < team; ++t) call(context, t);
}

void keep_team_awake(void (*f)(void* context), void* context) {
  const int threads = num_threads();
  if (threads == 1 || awake != nullptr) return f(context);
  mind_forks();
  AwakeTeam team;
  FirstException thrown;
#pragma omp parallel num_threads(threads)
  {
    const int index = omp_get_thread_num();
    if (index == 0) team.set_size(omp_get_num_threads());  // which may be fewer
#pragma omp barrier
    if (index == 0) {
      awake = &team;
      try {
        f(context);
      } catch (...) {
        thrown.keep();
      }
      awake = nullptr;
      team.end();
    } else {
      team.work(index);
    }
  }
  thrown.rethrow();
}

}  // namespace cpu
}  // namespace bittern
