#include "bittern/ops/quantize_per_group_backward.h"
#include "plan/kernel.h"

namespace bittern {

std::span<const Kernel<QuantizePerGroupBackward>> quantize_per_group_backward_cuda() { return {}; }

}  // namespace bittern
