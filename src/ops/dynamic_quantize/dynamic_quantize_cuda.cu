#include "bittern/ops/dynamic_quantize.h"
#include "plan/kernel.h"

namespace bittern {

std::span<const Kernel<DynamicQuantize>> dynamic_quantize_cuda() { return {}; }

}  // namespace bittern
