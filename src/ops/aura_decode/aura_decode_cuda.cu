#include "bittern/ops/aura_decode.h"
#include "plan/kernel.h"

namespace bittern {

std::span<const Kernel<AuraDecode>> aura_decode_cuda() { return {}; }

}  // namespace bittern
