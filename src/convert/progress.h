// Progress of work that several threads share.
#pragma once
#include <atomic>
#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <thread>

#include "bittern/convert.h"
#include "bittern/status.h"

namespace bittern {

// Calls a function of the caller's, which returns whether to go on: cancelled where it says no, or
// throws.
template <class F>
Status ask(const F& go_on) {
  try {
    if (go_on()) return {};
  } catch (const std::exception& error) {
    return {Code::cancelled, std::string("cancelled: the callback threw: ") + error.what()};
  } catch (...) {
    return {Code::cancelled, "cancelled: the callback threw"};
  }
  return {Code::cancelled, "cancelled by the callback"};
}

// Any thread adds. The caller's function is called on the thread that made this, and may have it
// that no thread begins anything more.
class TeamProgress {
 public:
  // `tell` may be empty, and outlives this.
  TeamProgress(const ModelProgressFunction& tell, const ModelProgress& state)
      : tell_(tell), state_(state) {}

  // On the thread that made this, between tensors.
  void begin(std::string_view tensor) { state_.tensor = tensor; }
  Status end();  // tells how far it has come

  // On any thread: before something is begun, and when `weights` are done.
  Status go_on() const;
  Status add(std::uint64_t weights);

 private:
  const ModelProgressFunction& tell_;
  ModelProgress state_;
  const std::thread::id maker_ = std::this_thread::get_id();
  std::atomic<std::uint64_t> done_ = 0;
  std::atomic<bool> stopped_ = false;
  Status why_;  // written before stopped_
};

}  // namespace bittern
