#include "bittern/ops/gdn_recurrent_step.h"
#include "plan/kernel.h"

namespace bittern {

std::span<const Kernel<GdnRecurrentStep>> gdn_recurrent_step_cuda() { return {}; }

}  // namespace bittern
