#include <omp.h>
#include <pthread.h>

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

// GCC's runtime keeps a team's threads for the next team. In a forked child it waits for them too,
// although they do not exist there.
void mind_forks() {
  [[maybe_unused]] static const int registered =
      pthread_atfork(nullptr, nullptr, [] { orphaned.store(true, std::memory_order_relaxed); });
}

}  // namespace cpu
}  // namespace bittern
