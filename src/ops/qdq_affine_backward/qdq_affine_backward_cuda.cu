#include "bittern/ops/qdq_affine_backward.h"
#include "plan/kernel.h"

namespace bittern {

std::span<const Kernel<QdqAffineBackward>> qdq_affine_backward_cuda() { return {}; }

}  // namespace bittern
