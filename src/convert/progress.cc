#include "convert/progress.h"

namespace bittern {

Status TeamProgress::go_on() const {
  return stopped_.load(std::memory_order_acquire) ? why_ : Status();
}

Status TeamProgress::add(std::uint64_t weights) {
  done_.fetch_add(weights, std::memory_order_relaxed);
  return std::this_thread::get_id() == maker_ ? end() : go_on();
}

Status TeamProgress::end() {
  if (!tell_) return {};
  BITTERN_TRY(go_on());
  state_.done = done_.load(std::memory_order_relaxed);
  why_ = ask([&] { return tell_(state_); });
  if (!why_.ok()) stopped_.store(true, std::memory_order_release);
  return why_;
}

}  // namespace bittern
