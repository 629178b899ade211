// Whether kernels made of vdpbf16ps (cpu/bf16-inl.h) can run.
#pragma once
#include "bittern/status.h"

namespace bittern::cpu {

bool has_bf16();          // the CPU has AVX512_BF16, and the target in use is AVX3_DL
Status bf16_supported();  // that, as a kernel's `supports`

}  // namespace bittern::cpu
