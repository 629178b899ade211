// A CUDA device made of this CPU: enough of CUDA C++ to run the plug-in's kernels, unchanged, where
// there is no GPU. Every thread of a block is a fibre, blocks run one after the other, and the
// fibres of a block or a warp meet at barriers, so what is checked is what the kernel computes:
// indices, tails, orders of sums, shared memory and who waits for whom. Not its speed, and not
// races that this one interleaving does not show.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <type_traits>

#define BITTERN_CUDA_EMULATED 1
#define __CUDACC__ 1
#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __shared__ static
#define __constant__ static
#define __restrict__ __restrict
#define __grid_constant__
#define __launch_bounds__(...)
#define __CUDA_ARCH__ 900

struct uint3 {
  unsigned x = 0, y = 0, z = 0;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3() = default;
  dim3(unsigned a, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
#define BITTERN_VECTOR(T, name)                                                      \
  struct alignas(2 * sizeof(T)) name##2 { T x, y; };                                 \
  struct alignas(4 * sizeof(T) > 16 ? 16 : 4 * sizeof(T)) name##4 { T x, y, z, w; }; \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                         \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
BITTERN_VECTOR(float, float)
BITTERN_VECTOR(double, double)
BITTERN_VECTOR(int, int)
BITTERN_VECTOR(unsigned, uint)
BITTERN_VECTOR(short, short)
BITTERN_VECTOR(unsigned short, ushort)
BITTERN_VECTOR(signed char, char)
BITTERN_VECTOR(unsigned char, uchar)
BITTERN_VECTOR(long long, longlong)
BITTERN_VECTOR(unsigned long long, ulonglong)
#undef BITTERN_VECTOR

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;
inline constexpr int warpSize = 32;

namespace emulation {

// Runs body() once for every thread of the grid.
void run_grid(dim3 grid, dim3 block, std::size_t shared_bytes, const std::function<void()>& body);
void* dynamic_shared();

void block_barrier();
// The threads of the block for which f is true, known to all once all have called it.
int block_count(int predicate);

// One of `threads` threads at barrier 1..15, which waits for the others or goes on.
void named_barrier(int barrier, int threads, bool wait);

// Each lane of `mask` hands over up to 64 bytes and, when all of them have, may read them all.
struct Slot {
  alignas(16) std::byte bytes[64];
};
const Slot* exchange(unsigned mask, const void* data, std::size_t bytes);
int lane();

template <class T>
T shuffle(unsigned mask, T value, int source) {
  static_assert(sizeof(T) <= sizeof(Slot));
  const Slot* slots = exchange(mask, &value, sizeof value);
  T out;
  std::memcpy(&out, slots[source].bytes, sizeof out);
  return out;
}

}  // namespace emulation

// ---- barriers and warp functions ----

inline void __syncthreads() { emulation::block_barrier(); }
inline int __syncthreads_count(int predicate) { return emulation::block_count(predicate); }
inline int __syncthreads_or(int predicate) { return emulation::block_count(predicate) > 0; }
inline int __syncthreads_and(int predicate) { return emulation::block_count(!predicate) == 0; }
inline void __syncwarp(unsigned mask = ~0u) { (void)emulation::exchange(mask, "", 1); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline unsigned __activemask() { return ~0u; }

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const int lane = emulation::lane();
  return emulation::shuffle(mask, value, (lane & ~(width - 1)) + (source & (width - 1)));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  const int lane = emulation::lane(), source = lane ^ bits;
  return emulation::shuffle(mask, value, source / width > lane / width ? lane : source);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = emulation::lane(), source = lane + static_cast<int>(delta);
  return emulation::shuffle(mask, value, source / width == lane / width ? source : lane);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = emulation::lane(), source = lane - static_cast<int>(delta);
  return emulation::shuffle(mask, value, source >= lane / width * width ? source : lane);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const int truth = predicate != 0;
  const emulation::Slot* slots = emulation::exchange(mask, &truth, sizeof truth);
  unsigned votes = 0;
  for (unsigned i = 0; i < 32; ++i) {
    int vote = 0;
    if ((mask >> i & 1) != 0) std::memcpy(&vote, slots[i].bytes, sizeof vote);
    votes |= static_cast<unsigned>(vote) << i;
  }
  return votes;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) {
  return __ballot_sync(mask, predicate) == mask;
}
template <class T, class F>
T bittern_reduce_sync(unsigned mask, T value, F&& f) {
  const emulation::Slot* slots = emulation::exchange(mask, &value, sizeof value);
  bool first = true;
  T out = value;
  for (unsigned i = 0; i < 32; ++i) {
    if ((mask >> i & 1) == 0) continue;
    T other;
    std::memcpy(&other, slots[i].bytes, sizeof other);
    out = first ? other : f(out, other);
    first = false;
  }
  return out;
}
template <class T>
T __reduce_add_sync(unsigned mask, T v) {
  return bittern_reduce_sync(mask, v, [](T a, T b) { return a + b; });
}
template <class T>
T __reduce_min_sync(unsigned mask, T v) {
  return bittern_reduce_sync(mask, v, [](T a, T b) { return a < b ? a : b; });
}
template <class T>
T __reduce_max_sync(unsigned mask, T v) {
  return bittern_reduce_sync(mask, v, [](T a, T b) { return a > b ? a : b; });
}
template <class T>
T __reduce_or_sync(unsigned mask, T v) {
  return bittern_reduce_sync(mask, v, [](T a, T b) { return a | b; });
}

// ---- memory ----

template <class T>
T __ldcs(const T* p) {
  return *p;
}
template <class T>
T __ldcg(const T* p) {
  return *p;
}
template <class T>
T __ldca(const T* p) {
  return *p;
}
template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
T __ldlu(const T* p) {
  return *p;
}
template <class T>
T __ldcv(const T* p) {
  return *p;
}
template <class T>
void __stcs(T* p, T v) {
  *p = v;
}
template <class T>
void __stcg(T* p, T v) {
  *p = v;
}
template <class T>
void __stwt(T* p, T v) {
  *p = v;
}
template <class T>
T atomicAdd(T* p, std::type_identity_t<T> v) {
  const T old = *p;
  *p = static_cast<T>(old + v);
  return old;
}
template <class T>
T atomicMin(T* p, std::type_identity_t<T> v) {
  const T old = *p;
  *p = std::min(old, v);
  return old;
}
template <class T>
T atomicMax(T* p, std::type_identity_t<T> v) {
  const T old = *p;
  *p = std::max(old, v);
  return old;
}
template <class T>
T atomicOr(T* p, std::type_identity_t<T> v) {
  const T old = *p;
  *p = old | v;
  return old;
}
template <class T>
T atomicExch(T* p, std::type_identity_t<T> v) {
  const T old = *p;
  *p = v;
  return old;
}
template <class T>
T atomicCAS(T* p, std::type_identity_t<T> expected, std::type_identity_t<T> v) {
  const T old = *p;
  if (old == expected) *p = v;
  return old;
}

// ---- arithmetic ----

namespace emulation {
template <class To, class From>
To cast(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To out;
  std::memcpy(&out, &x, sizeof out);
  return out;
}
}  // namespace emulation

inline int __float_as_int(float x) { return emulation::cast<int>(x); }
inline unsigned __float_as_uint(float x) { return emulation::cast<unsigned>(x); }
inline float __int_as_float(int x) { return emulation::cast<float>(x); }
inline float __uint_as_float(unsigned x) { return emulation::cast<float>(x); }
inline long long __double_as_longlong(double x) { return emulation::cast<long long>(x); }
inline double __longlong_as_double(long long x) { return emulation::cast<double>(x); }
inline double __hiloint2double(int high, int low) {
  return __longlong_as_double(static_cast<long long>(high) << 32 | static_cast<unsigned>(low));
}
namespace emulation {
// As the hardware's minimum: a number before NaN, -0 before 0.
inline float least(float a, float b) {
  if (std::isnan(a)) return b;
  if (std::isnan(b) || a < b) return a;
  return b < a || std::signbit(b) ? b : a;
}
}  // namespace emulation
inline float __saturatef(float x) { return x > 0 ? std::min(x, 1.0f) : 0.0f; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fadd_rd(float a, float b) {
  const float sum = a + b, second = sum - a;  // and what is lost, exactly
  const float lost = (a - (sum - second)) + (b - second);
  return lost < 0 ? std::nextafter(sum, -std::numeric_limits<float>::infinity()) : sum;
}
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __drcp_rn(double a) { return 1.0 / a; }
inline double __dsqrt_rn(double a) { return std::sqrt(a); }
inline int __float2int_rn(float x) {
  if (std::isnan(x)) return 0;
  if (x >= 0x1p31f) return std::numeric_limits<int>::max();
  if (x < -0x1p31f) return std::numeric_limits<int>::min();
  return static_cast<int>(std::nearbyint(x));
}
inline int __float2int_rz(float x) { return __float2int_rn(std::trunc(x)); }
inline int __float2int_rd(float x) { return __float2int_rn(std::floor(x)); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __clzll(long long x) {
  return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x));
}
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
  unsigned out = 0;
  for (int i = 0; i < 32; ++i) out |= (x >> i & 1) << (31 - i);
  return out;
}
inline unsigned long long __brevll(unsigned long long x) {
  return static_cast<unsigned long long>(__brev(static_cast<unsigned>(x))) << 32 |
         __brev(static_cast<unsigned>(x >> 32));
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const unsigned long long both = static_cast<unsigned long long>(y) << 32 | x;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned pick = selector >> 4 * i & 0xf;
    unsigned byte = static_cast<unsigned>(both >> 8 * (pick & 7)) & 0xff;
    if ((pick & 8) != 0) byte = (byte & 0x80) != 0 ? 0xff : 0;
    out |= byte << 8 * i;
  }
  return out;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  const unsigned long long both = static_cast<unsigned long long>(high) << 32 | low;
  return static_cast<unsigned>(both << (shift & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  const unsigned long long both = static_cast<unsigned long long>(high) << 32 | low;
  return static_cast<unsigned>(both >> (shift & 31));
}
inline unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned shift) {
  const unsigned long long both = static_cast<unsigned long long>(high) << 32 | low;
  return static_cast<unsigned>(both >> std::min(shift, 32u));
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
  for (int i = 0; i < 32; i += 8) c += (a >> i & 0xff) * (b >> i & 0xff);
  return c;
}
inline void __nanosleep(unsigned) {}
inline void __trap() { __builtin_trap(); }
using std::isfinite;
using std::isinf;
using std::isnan;
template <class T>
T min(T a, T b) {
  return a < b ? a : b;
}
template <class T>
T max(T a, T b) {
  return a > b ? a : b;
}
