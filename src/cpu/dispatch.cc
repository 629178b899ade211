#include "cpu/dispatch.h"

#include <cpuid.h>

#include <atomic>
#include <cstdlib>
#include <string>
#include <vector>

namespace bittern::cpu {
namespace {

bool has_f16c() {  // a name that clang 14's __builtin_cpu_supports does not know
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

std::vector<Isa> detect() {
  // These also ask whether the operating system saves the registers.
  __builtin_cpu_init();
  std::vector<Isa> isas;
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi2") && has_f16c();
  const bool avx3 = avx2 && __builtin_cpu_supports("avx512f") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd");
  const bool avx3_dl =
      avx3 && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2") &&
      __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bitalg") &&
      __builtin_cpu_supports("avx512vpopcntdq") && __builtin_cpu_supports("vpclmulqdq") &&
      __builtin_cpu_supports("gfni");
  if (avx3_dl) isas.push_back(Isa::avx3_dl);
  if (avx3) isas.push_back(Isa::avx3);
  if (avx2) isas.push_back(Isa::avx2);
  return isas;
}

const std::vector<Isa>& detected() {
  static const auto* const isas = new std::vector<Isa>(detect());
  return *isas;
}

Isa choose() {
  const char* wanted = std::getenv("BITTERN_ISA");
  for (const Isa isa : detected())
    if (wanted == nullptr || name(isa) == wanted) return isa;
  return Isa::none;  // also for a name we do not know: `ref` is slow, but no surprise
}

std::atomic<Isa> forced{Isa::none};

}  // namespace

const bool kPagesInTurn = [] {
  __builtin_cpu_init();
  return static_cast<bool>(__builtin_cpu_is("intel"));
}();

std::string_view name(Isa isa) {
  constexpr std::string_view kNames[] = {"AVX3_DL", "AVX3", "AVX2", "none"};
  return kNames[static_cast<int>(isa)];
}

Isa isa() {
  static const Isa chosen = choose();
  const Isa now = forced.load(std::memory_order_relaxed);
  return now == Isa::none ? chosen : now;
}

std::span<const Isa> available_isas() { return detected(); }

void force_isa(Isa isa) { forced.store(isa, std::memory_order_relaxed); }

std::string_view architecture(Device) { return name(isa()); }

Status supported() {
  return isa() == Isa::none ? unsupported("needs a CPU with AVX2 (see BITTERN_ISA)") : Status();
}

}  // namespace bittern::cpu
