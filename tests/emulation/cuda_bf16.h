#pragma once
#include "emulation.h"

struct __nv_bfloat16 {
  std::uint16_t bits;
};
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
namespace emulation {
std::uint16_t float_to_bfloat(float x);
}
inline __nv_bfloat16 __ushort_as_bfloat16(std::uint16_t bits) { return {bits}; }
inline std::uint16_t __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline float __bfloat162float(__nv_bfloat16 x) {
  return __uint_as_float(static_cast<unsigned>(x.bits) << 16);
}
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return {emulation::float_to_bfloat(x)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
inline float2 __bfloat1622float2(__nv_bfloat162 x) {
  return {__bfloat162float(x.x), __bfloat162float(x.y)};
}
inline __nv_bfloat162 __hmin2(__nv_bfloat162 x, __nv_bfloat162 y) {
  const float2 a = __bfloat1622float2(x), b = __bfloat1622float2(y);
  return __floats2bfloat162_rn(emulation::least(a.x, b.x), emulation::least(a.y, b.y));
}
inline __nv_bfloat162 __hmax2(__nv_bfloat162 x, __nv_bfloat162 y) {
  const float2 a = __bfloat1622float2(x), b = __bfloat1622float2(y);
  return __floats2bfloat162_rn(-emulation::least(-a.x, -b.x), -emulation::least(-a.y, -b.y));
}
