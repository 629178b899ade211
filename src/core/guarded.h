// The one place where what the standard library throws becomes a Status. Inside the library an
// allocation that fails throws; every function of include/bittern catches that here.
#pragma once
#include <new>
#include <string_view>
#include <utility>

#include "bittern/status.h"

namespace bittern {

// Inside a catch (...): what was thrown, as "name: what". Needs no memory where there is none.
Status caught(std::string_view name) noexcept;

// Runs f(), which returns a Status or a Result.
template <class F>
auto guarded(std::string_view name, F&& f) noexcept -> decltype(f()) {
  try {
    return std::forward<F>(f)();
  } catch (...) {
    return caught(name);
  }
}

// For what is made once and kept for ever: where memory was short, it is made again by the next
// call.
inline void throw_if_out_of_memory(const Status& status) {
  if (status.code() == Code::out_of_memory) throw std::bad_alloc();
}

}  // namespace bittern
