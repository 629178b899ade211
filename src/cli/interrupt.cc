#include "cli/interrupt.h"

namespace bittern::cli {
namespace {

volatile std::sig_atomic_t noted_signal = 0;

void note(int signal) { noted_signal = signal; }

}  // namespace

StopOnSignal::StopOnSignal() {
  struct sigaction action{};
  action.sa_handler = note;
  action.sa_flags = static_cast<int>(SA_RESETHAND | SA_RESTART);
  // One that is ignored stays so: nohup and the like ask for that.
  sigaction(SIGINT, nullptr, &int_before_);
  sigaction(SIGTERM, nullptr, &term_before_);
  if (int_before_.sa_handler != SIG_IGN) sigaction(SIGINT, &action, nullptr);
  if (term_before_.sa_handler != SIG_IGN) sigaction(SIGTERM, &action, nullptr);
}

StopOnSignal::~StopOnSignal() {
  sigaction(SIGINT, &int_before_, nullptr);
  sigaction(SIGTERM, &term_before_, nullptr);
}

int StopOnSignal::noted() { return noted_signal; }

Status StopOnSignal::check() {
  if (noted_signal == 0) return {};
  return {Code::cancelled, noted_signal == SIGINT ? "stopped by SIGINT" : "stopped by SIGTERM"};
}

}  // namespace bittern::cli
