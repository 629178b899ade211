#include "bittern/ops/gated_rms_norm_backward.h"
#include "plan/kernel.h"

namespace bittern {

std::span<const Kernel<GatedRmsNormBackward>> gated_rms_norm_backward_cuda() { return {}; }

}  // namespace bittern
