// Picks the SIMD target a cpu kernel runs on. Highway compiles each *_cpu.cc once per target; this
// chooses among them. (Highway's own chooser is in a shared library. With ours only its headers are
// needed, and nothing at run time.)
#pragma once
#include <span>
#include <string_view>

#include "bittern/device.h"
#include "bittern/status.h"

namespace bittern::cpu {

// Best first. A CPU without AVX2 has none of them and uses `ref`.
enum class Isa { avx3_dl, avx3, avx2, none };
inline constexpr int kIsaCount = 3;

std::string_view name(Isa isa);  // Highway's names: "AVX3_DL" ...

// The target in use: the best this CPU has, or the one BITTERN_ISA names (AVX2, AVX3, AVX3_DL).
Isa isa();
Status check_isa_variable();  // whether it names one that this CPU has

// All that this CPU can run, best first.
std::span<const Isa> available_isas();

// For tests and `bittern check`: use `isa` from now on; Isa::none restores the default.
void force_isa(Isa isa);

// Whether reading from several pages in turn is faster than reading from end to end: on Intel
// servers by a third, while on AMD's it is slower.
extern const bool kPagesInTurn;

// The architecture in a cpu kernel's sku, and its `supports` on a CPU without AVX2.
std::string_view architecture(Device = {});
Status supported();

template <class F>
struct PerIsa {
  F* function[kIsaCount];
  F* best() const { return function[static_cast<int>(isa())]; }
};

}  // namespace bittern::cpu

// After the last target of a *_cpu.cc (#if HWY_ONCE): BITTERN_EXPORT(Run) then
// BITTERN_CALL(Run)(...).
#define BITTERN_EXPORT(FUNCTION)                                                               \
  constexpr ::bittern::cpu::PerIsa<std::remove_pointer_t<decltype(HWY_CHOOSE_AVX2(FUNCTION))>> \
      k##FUNCTION##PerIsa = {                                                                  \
          {HWY_CHOOSE_AVX3_DL(FUNCTION), HWY_CHOOSE_AVX3(FUNCTION), HWY_CHOOSE_AVX2(FUNCTION)}}
#define BITTERN_CALL(FUNCTION) (*k##FUNCTION##PerIsa.best())
