#include "bittern/ops/aura_encode.h"
#include "plan/kernel.h"

namespace bittern {

std::span<const Kernel<AuraEncode>> aura_encode_cuda() { return {}; }

}  // namespace bittern
