#include "bittern/ops/gdn_recompute_w_u.h"
#include "plan/kernel.h"

namespace bittern {

std::span<const Kernel<GdnRecomputeWU>> gdn_recompute_w_u_cuda() { return {}; }

}  // namespace bittern
