#include "cpu/bf16.h"

#include <cpuid.h>

#include <string>

#include "cpu/dispatch.h"

namespace bittern::cpu {
namespace {

bool detect() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a >> 5 & 1) != 0;
}

}  // namespace

bool has_bf16() {
  static const bool detected = detect();
  return detected && isa() == Isa::avx3_dl;
}

Status bf16_supported() {
  if (has_bf16()) return {};
  if (isa() == Isa::avx3_dl) return unsupported("needs a CPU with AVX512_BF16");
  return unsupported("needs AVX512_BF16 and the target AVX3_DL, got " + std::string(name(isa())));
}

}  // namespace bittern::cpu
