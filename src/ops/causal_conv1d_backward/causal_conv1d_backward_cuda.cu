#include "bittern/ops/causal_conv1d_backward.h"
#include "plan/kernel.h"

namespace bittern {

std::span<const Kernel<CausalConv1dBackward>> causal_conv1d_backward_cuda() { return {}; }

}  // namespace bittern
