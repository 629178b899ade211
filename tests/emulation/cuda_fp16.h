#pragma once
#include "emulation.h"

struct __half {
  std::uint16_t bits;
};
struct __half2 {
  __half x, y;
};
namespace emulation {
float half_to_float(std::uint16_t bits);
std::uint16_t float_to_half(float x);
}  // namespace emulation
inline __half __ushort_as_half(std::uint16_t bits) { return {bits}; }
inline std::uint16_t __half_as_ushort(__half x) { return x.bits; }
inline float __half2float(__half x) { return emulation::half_to_float(x.bits); }
inline __half __float2half_rn(float x) { return {emulation::float_to_half(x)}; }
inline __half2 __floats2half2_rn(float x, float y) {
  return {__float2half_rn(x), __float2half_rn(y)};
}
inline float2 __half22float2(__half2 x) { return {__half2float(x.x), __half2float(x.y)}; }
inline __half2 __hmin2(__half2 x, __half2 y) {
  const float2 a = __half22float2(x), b = __half22float2(y);
  return __floats2half2_rn(emulation::least(a.x, b.x), emulation::least(a.y, b.y));
}
inline __half2 __hmax2(__half2 x, __half2 y) {
  const float2 a = __half22float2(x), b = __half22float2(y);
  return __floats2half2_rn(-emulation::least(-a.x, -b.x), -emulation::least(-a.y, -b.y));
}
inline __half __low2half(__half2 x) { return x.x; }
inline __half __high2half(__half2 x) { return x.y; }
