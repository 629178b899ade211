#include "bittern/ops/unpack_codes.h"
#include "plan/kernel.h"

namespace bittern {

std::span<const Kernel<UnpackCodes>> unpack_codes_cuda() { return {}; }

}  // namespace bittern
