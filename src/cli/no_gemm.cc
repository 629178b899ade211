// In place of gemm.cc where the command is built without oneDNN.
#include "cli/gemm.h"

namespace bittern::cpu {

Status gemm_f32(std::int64_t, std::int64_t, std::int64_t, const float*, const float*, float*) {
  return unsupported("gemm: built without oneDNN");
}

Status gemm_bf16(std::int64_t, std::int64_t, std::int64_t, const bf16*, const bf16*, bf16*) {
  return unsupported("gemm: built without oneDNN");
}

}  // namespace bittern::cpu
