// Signals that ask a long run to stop.
#pragma once
#include <csignal>
#include <string_view>

#include "bittern/status.h"

namespace bittern::cli {

// While one lives, the first SIGINT or SIGTERM is noted instead of ending the program; a second one
// ends it. What was noted stays noted: the exit status is 128 and the signal's number.
class StopOnSignal {
 public:
  StopOnSignal();
  ~StopOnSignal();
  StopOnSignal(const StopOnSignal&) = delete;
  StopOnSignal& operator=(const StopOnSignal&) = delete;

  static int noted();     // the signal; 0: none
  static Status check();  // Code::cancelled once one was noted

 private:
  struct sigaction int_before_{}, term_before_{};
};

}  // namespace bittern::cli
