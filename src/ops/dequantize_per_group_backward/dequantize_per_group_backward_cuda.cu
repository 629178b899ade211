#include "bittern/ops/dequantize_per_group_backward.h"
#include "plan/kernel.h"

namespace bittern {

std::span<const Kernel<DequantizePerGroupBackward>> dequantize_per_group_backward_cuda() {
  return {};
}

}  // namespace bittern
