#include "cpu/dispatch.h"

#include <cpuid.h>
#include <hwy/detect_targets.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "core/guarded.h"

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
  // A build may leave targets out.
  if (avx3_dl && (HWY_TARGETS & HWY_AVX3_DL) != 0) isas.push_back(Isa::avx3_dl);
  if (avx3 && (HWY_TARGETS & HWY_AVX3) != 0) isas.push_back(Isa::avx3);
  if (avx2 && (HWY_TARGETS & HWY_AVX2) != 0) isas.push_back(Isa::avx2);
  return isas;
}

const std::vector<Isa>& detected() {
  static const auto* const isas = new std::vector<Isa>(detect());
  return *isas;
}

struct Choice {
  Isa isa = Isa::none;
  Status status;
};

// BITTERN_ISA, in letters of either case; what it may not be falls back to the best, with a status.
Choice choose() {
  Choice choice{detected().empty() ? Isa::none : detected().front(), {}};
  const char* given = std::getenv("BITTERN_ISA");
  if (given == nullptr) return choice;
  const std::string_view text = given;
  const std::string where = std::string("BITTERN_ISA: ").append(text.empty() ? "empty" : text);
  for (const Isa isa : {Isa::avx3_dl, Isa::avx3, Isa::avx2}) {
    if (!std::equal(text.begin(), text.end(), name(isa).begin(), name(isa).end(),
                    [](unsigned char a, char b) { return std::toupper(a) == b; })) {
      continue;
    }
    const auto& all = detected();
    if (std::find(all.begin(), all.end(), isa) != all.end()) {
      choice.isa = isa;
      return choice;
    }
    std::string have;
    for (const Isa other : all) have.append(have.empty() ? "" : " or ").append(name(other));
    choice.status = invalid(where + ", which this CPU or this build lacks; " +
                            (have.empty() ? "it has no target of ours" : "expected " + have));
    return choice;
  }
  choice.status =
      invalid(where + ", expected AVX2, AVX3 (AVX-512) or AVX3_DL (AVX-512 since Ice Lake)");
  return choice;
}

const Choice& choice() {
  static const auto* const made = [] {
    Choice chosen = choose();
    throw_if_out_of_memory(chosen.status);
    return new Choice(std::move(chosen));
  }();
  return *made;
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
  const Isa now = forced.load(std::memory_order_relaxed);
  return now == Isa::none ? choice().isa : now;
}

std::span<const Isa> available_isas() { return detected(); }

void force_isa(Isa isa) { forced.store(isa, std::memory_order_relaxed); }

std::string_view architecture(Device) { return name(isa()); }

Status check_isa_variable() { return choice().status; }

Status supported() { return isa() == Isa::none ? unsupported("needs a CPU with AVX2") : Status(); }

}  // namespace bittern::cpu
