#include "bittern/ops/aura_rotate.h"
#include "plan/kernel.h"

namespace bittern {

std::span<const Kernel<AuraRotate>> aura_rotate_cuda() { return {}; }

}  // namespace bittern
