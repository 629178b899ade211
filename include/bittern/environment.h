// What the environment variables and set_num_threads may ask for.
#pragma once
#include "bittern/device.h"
#include "bittern/status.h"

namespace bittern {

int max_threads() noexcept;  // 256, or one per core where there are more

// Whether set_num_threads takes `threads`: no more than max_threads(), and no more than the system
// lets this process start. A value that it does not take changes nothing but the next answer of
// check_environment().
Status check_num_threads(int threads) noexcept;

// Whether BITTERN_THREADS, BITTERN_ISA and BITTERN_CUDA_PLUGIN, read once, and the last
// set_num_threads have values that are accepted. select() fails where they have not.
Status check_environment() noexcept;

}  // namespace bittern
